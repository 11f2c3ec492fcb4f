"""Optimizers that communicate less by their method: DiLoCo and 1-bit Adam."""
