"""Compressors that send every value: as it is, cast to 16 bits, or without loss."""
