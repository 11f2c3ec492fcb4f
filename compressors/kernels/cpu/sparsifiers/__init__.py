"""CPU kernels that select entries."""
