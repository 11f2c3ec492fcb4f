"""CPU kernels of casts and of lossless coding."""
