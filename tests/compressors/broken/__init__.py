"""Broken compressors, each a mistake that an author could make, and what the kit must say of it."""
