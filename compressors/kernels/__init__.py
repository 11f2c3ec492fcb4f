"""Numba kernels for the CPU, one file an algorithm family; imported on first use.

Each does what the array code of its compressor does, bit for bit, in one pass over memory where
that is possible. They release the GIL and are cached on disk.
"""
