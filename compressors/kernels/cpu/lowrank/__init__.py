"""CPU kernels of low-rank factors and their products."""
