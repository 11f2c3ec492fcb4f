"""Autotuning of the engine's limits, never of anything that changes a compressor's result."""
