"""Autotuning: the fusion threshold and the cycle time, never anything that changes a result."""
