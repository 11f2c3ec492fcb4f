"""CUDA kernels of quantisers."""
