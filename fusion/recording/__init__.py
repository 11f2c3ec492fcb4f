"""What the engine counts, and what it tells observers."""
