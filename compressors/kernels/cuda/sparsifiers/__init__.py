"""CUDA kernels that select entries."""
