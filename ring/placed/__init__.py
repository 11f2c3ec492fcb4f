"""Ranks in processes that others have placed: workers of Ray or Spark, pods, batch tasks."""
