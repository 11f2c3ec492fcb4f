"""What tests of codecs with blocks share: vectors, contexts, payloads, and array code's NumPy."""

import types

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import Context
from ringlet.compressors.base.contract import storage

# What is not NumPy itself takes the path of array code, as CuPy does.
plain = types.ModuleType("plain")
plain.__dict__.update(np.__dict__)

every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-(2.0**40), 2.0**40, width=32)


def vectors(elements):
    """Return a strategy of flat float32 arrays of up to 200 ``elements``."""
    return hnp.arrays(np.float32, st.integers(0, 200), elements=elements)


def context(n, **fields):
    """Return a context for ``n`` elements."""
    return Context(shape=(n,), numel=n, **fields)


def payload_for(compressor, n):
    """Return a payload for ``n`` elements that nobody has cleared."""
    return {p.name: np.full(p.elements, 77, storage(p.dtype)) for p in compressor.layout(n)}
