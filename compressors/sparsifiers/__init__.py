"""Compressors that send some of the values: the largest, or a random choice."""
