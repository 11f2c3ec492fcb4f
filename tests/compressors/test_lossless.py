"""Lossless compression: exact bit for bit, whatever the bits are."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import BF16, Context, Lossless, PayloadError, parse
from ringlet.compressors.core.threads import MIN_ELEMENTS

plain = types.ModuleType("plain")
plain.__dict__.update(np.__dict__)

DTYPES = ["bf16", "fp32"]
KINDS = {
    "gauss": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "heavy": lambda rng, n: rng.standard_normal(n) ** 9,
    "wide": lambda rng, n: np.exp(20 * rng.standard_normal(n)),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.05),
    "bits": lambda rng, n: rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
}


def target(x, dtype):
    """Return the bits that must come out."""
    if dtype == "fp32":
        return x.view(np.uint32)
    return BF16().compress(x, Context())["values"].astype(np.uint32) << 16


def agree(x, dtype):
    compressor, ctx = Lossless(dtype), Context(numel=x.size)
    fast = compressor.compress(x, ctx)
    reference = compressor.compress(x, Context(numel=x.size, xp=plain))
    assert fast.keys() == reference.keys()
    for name in fast:
        assert fast[name].dtype == reference[name].dtype
        np.testing.assert_array_equal(fast[name], reference[name], err_msg=name)
    outs = np.zeros((2, x.size), np.float32)
    compressor.decompress(fast, outs[0], ctx)
    compressor.decompress(fast, outs[1], Context(numel=x.size, xp=plain))
    for out in outs:
        np.testing.assert_array_equal(out.view(np.uint32), target(x, dtype))
    with np.errstate(all="ignore"):
        total = np.full(x.size, 0.5, np.float32)
        compressor.accumulate(fast, total, ctx)
        np.testing.assert_array_equal(total, np.float32(0.5) + outs[0])


@pytest.mark.parametrize("dtype", DTYPES)
@given(bits=hnp.arrays(np.uint32, st.integers(0, 1100)))
@settings(max_examples=80)
def test_any_bits_come_back(dtype, bits):
    agree(bits.view(np.float32), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    n=st.sampled_from([1, 511, 512, 513, 1024, 3000, 10_000]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_every_width_comes_back(dtype, kind, n, seed):
    with np.errstate(over="ignore"):
        agree(KINDS[kind](np.random.default_rng(seed), n).astype(np.float32), dtype)


def test_tensors_in_ranges_come_back():
    agree(np.random.default_rng(0).laplace(size=2 * MIN_ELEMENTS + 77).astype(np.float32), "bf16")


@pytest.mark.parametrize(
    ("kind", "dtype", "low", "high"),
    [
        ("gauss", "bf16", 0.69, 0.71),
        ("laplace", "bf16", 0.71, 0.74),
        ("gauss", "fp32", 0.84, 0.86),
        ("laplace", "fp32", 0.85, 0.87),
        ("bits", "bf16", 1.0, 1.01),
    ],
)
def test_sizes_are_what_the_documentation_says(kind, dtype, low, high):
    x = KINDS[kind](np.random.default_rng(1), 200_000).astype(np.float32)
    size = sum(array.nbytes for array in Lossless(dtype).compress(x, Context()).values())
    assert low <= size / x.size / (2 if dtype == "bf16" else 4) <= high


def test_zeros_take_no_bits_of_exponent():
    payload = Lossless().compress(np.zeros(5120, np.float32), Context())
    assert payload["codes"].size == payload["spares"].size == 0


@pytest.mark.parametrize("name", ["tops", "widths", "counts", "codes", "spares", "mantissas"])
def test_a_truncated_payload_is_refused(name):
    x = np.random.default_rng(2).standard_normal(2000).astype(np.float32)
    payload = Lossless().compress(x, Context())
    with pytest.raises(PayloadError):
        Lossless().decompress(payload | {name: payload[name][:-1]}, x, Context())
    payload["widths"][1] = 7
    with pytest.raises(PayloadError):
        Lossless().decompress(payload, x, Context())


def test_values_of_a_sparsifier_can_be_coded_without_loss():
    x = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    sent = []
    for spec in ("topk(ratio=0.1)", 'topk(ratio=0.1) | lossless(dtype="fp32")'):
        compressor, out = parse(spec), np.empty_like(x)
        compressor.decompress(compressor.compress(x, Context(numel=x.size)), out, Context())
        sent.append(out)
    np.testing.assert_array_equal(*sent)
