"""Kernels for CPUs, compiled by Numba: they release the GIL and are cached on disk."""
