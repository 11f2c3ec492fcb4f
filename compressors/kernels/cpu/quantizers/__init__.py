"""CPU kernels of quantisers."""
