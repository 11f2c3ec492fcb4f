"""Kernels, one file an algorithm family; imported on first use.

Each does what the array code of its compressor does, bit for bit, and in one pass over memory where
that is possible. They import no compressor.
"""
