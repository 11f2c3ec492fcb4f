"""What tests of codecs with blocks share: vectors, contexts, payloads, and array code's NumPy."""

import types

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import Compressor, Context
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


def agrees_with_array_code(compressor, x, seed):
    """Assert that kernels do what array code does, bit for bit."""
    n = x.size
    reference = compressor.compress(x, context(n, seed=seed))
    fast = payload_for(compressor, n)
    compressor.encode_into(x, fast, context(n, seed=seed))
    assert all(np.array_equal(reference[name], fast[name]) for name in fast)
    outs = np.zeros((2, n), np.float32)
    compressor.decompress(reference, outs[0], context(n))
    compressor.decompress(reference, outs[1], context(n, xp=plain))
    np.testing.assert_array_equal(outs[0], outs[1])
    with np.errstate(all="ignore"):
        total = np.ones(n, np.float32)
        compressor.accumulate(reference, total, context(n))
        np.testing.assert_array_equal(total, np.float32(1) + outs[0])
        held = np.random.default_rng(seed).standard_normal((1, n)).astype(np.float32).repeat(2, 0)
        compressor.feedback_into(x, held[0], 0.75, fast, context(n, seed=seed))
        Compressor.feedback_into(compressor, x, held[1], 0.75, reference, context(n, seed=seed))
    assert all(np.array_equal(reference[name], fast[name]) for name in fast)
    assert held[0].tobytes() == held[1].tobytes()
    assert np.isfinite(held).all()
