"""CUDA kernels of casts and of lossless coding."""
