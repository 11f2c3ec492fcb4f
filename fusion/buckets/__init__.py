"""Fusion buckets, one kind a file, declared groups made of them, and unscaling."""
