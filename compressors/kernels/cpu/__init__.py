"""Kernels for CPUs, in rooms like those of the compressors that they belong to."""
