"""CPU kernels of low-rank factors: orthonormal bases, and products."""
