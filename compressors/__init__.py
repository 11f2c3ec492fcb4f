"""Gradient compressors."""

if __name__ != "ringlet.compressors":  # a bare `import compressors` would be a second registry
    raise ImportError("import this package as ringlet.compressors, not as compressors")
