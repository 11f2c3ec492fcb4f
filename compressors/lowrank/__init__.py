"""Compressors that send factors of a matrix of low rank."""
