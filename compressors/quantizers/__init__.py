"""Compressors that send every value in few bits."""
