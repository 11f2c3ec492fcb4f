"""Ranks in processes that others have placed: engines' workers, pods, tasks of batch systems."""
