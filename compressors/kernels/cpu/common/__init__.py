"""What CPU kernels of several rooms share: vectors, packing, random numbers, residuals."""
