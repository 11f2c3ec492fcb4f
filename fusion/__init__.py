"""The fusion engine: what travels together, in which stream, and when."""

if __name__ != "ringlet.fusion":
    raise ImportError("import this package as ringlet.fusion, not as fusion")
