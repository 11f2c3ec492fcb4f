"""Observers of the engine: timelines and metrics, and what writes them."""
