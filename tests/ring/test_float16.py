"""16-bit floats: conversions equal NumPy's, sums are taken in float32 and rounded once."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import ReduceOp
from ringlet.ring.arguments import divided
from ringlet.ring.dtypes import storage
from ringlet.ring.float16 import HALVES, kernels
from ringlet.ring.rank_order import combine, even_counts

EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def bfloat16_to_float32(half):
    return (half.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", HALVES)
def test_widening_equals_numpy_for_every_half(name):
    single = np.empty(EVERY_HALF.size, np.float32)
    kernels(name).widen(EVERY_HALF, single)
    expected = bfloat16_to_float32(EVERY_HALF)
    if name == "float16":
        expected = EVERY_HALF.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(
        single[numbers].view(np.uint32), expected[numbers].view(np.uint32)
    )
    assert np.isnan(single[~numbers]).all()


@pytest.mark.parametrize("name", HALVES)
def test_narrowing_gives_back_every_half(name):
    single = np.empty(EVERY_HALF.size, np.float32)
    half = np.empty_like(EVERY_HALF)
    kernels(name).widen(EVERY_HALF, single)
    kernels(name).narrow(single, half)
    numbers = ~np.isnan(single)
    np.testing.assert_array_equal(half[numbers], EVERY_HALF[numbers])
    kernels(name).widen(half, single)
    assert np.isnan(single[~numbers]).all()


def narrowed(name, bits):
    half = np.empty(bits.size, np.uint16)
    kernels(name).narrow(bits.view(np.float32), half)
    return half


def oracle_narrowed(name, bits):
    if name == "float16":
        with np.errstate(all="ignore"):
            return bits.view(np.float32).astype(np.float16).view(np.uint16)
    wide = bits.astype(np.uint64)
    tail, kept = wide & 0xFFFF, wide >> 16
    return (kept + ((tail > 0x8000) | ((tail == 0x8000) & (kept & 1 == 1)))).astype(np.uint16)


@pytest.mark.parametrize("name", HALVES)
def test_narrowing_rounds_to_nearest_even(name):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 18, np.uint32)
    shift = 16 if name == "bfloat16" else 13
    ties = (rng.integers(0, 1 << (31 - shift), 1 << 16, np.uint32) << shift) | (1 << (shift - 1))
    bits = np.concatenate([bits, ties.astype(np.uint32), ties.astype(np.uint32) | (1 << 31)])
    numbers = bits[~np.isnan(bits.view(np.float32))]
    np.testing.assert_array_equal(narrowed(name, numbers), oracle_narrowed(name, numbers))


@pytest.mark.parametrize("name", HALVES)
def test_every_nan_becomes_the_same_nan(name):
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert set(narrowed(name, bits).tolist()) == {0x7E00 if name == "float16" else 0x7FC0}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(HALVES), st.integers(1, 5), st.integers(0, 70000), st.integers(0, 2**32 - 1))
def test_sums_are_float32_sums_in_rank_order_rounded_once(name, ranks, n, seed):
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(0, 1 << 16, n, np.uint16) for _ in range(ranks)]
    widened = np.empty((ranks, n), np.float32)
    for piece, single in zip(pieces, widened, strict=True):
        kernels(name).widen(piece, single)
    total = widened[0].copy()
    with np.errstate(all="ignore"):
        for single in widened[1:]:
            total += single
    out = np.empty(n, np.uint16)
    combine(pieces, [out], ReduceOp.SUM, name)
    numbers = ~np.isnan(total)
    expected = oracle_narrowed(name, total[numbers].view(np.uint32))
    np.testing.assert_array_equal(out[numbers], expected)
    if ranks > 1:
        assert len(set(out[~numbers].tolist())) <= 1  # all NaNs are the same


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int32"])
def test_an_out_may_be_any_of_the_pieces(name):
    values = [(np.arange(1, 50001) % 97).astype(storage(name)) for _ in range(3)]
    expected = np.empty_like(values[0])
    combine(values, [expected], ReduceOp.SUM, name)
    combine(values, values, ReduceOp.SUM, name)
    for value in values:
        np.testing.assert_array_equal(value, expected)


def test_arguments_are_checked():
    assert even_counts(7, 3) == [3, 2, 2]
    assert divided(None, 2, 6) == [3, 3]
    for counts, total in (([1, 2], 4), ([5, -1], 4), ([4], 4), (None, 5)):
        with pytest.raises(ValueError, match="do not divide"):
            divided(counts, 2, total)
    with pytest.raises(ValueError, match="op must be"):
        combine([np.zeros(1)], [np.zeros(1)], ReduceOp.ADASUM, "float64")


def test_importing_the_transports_loads_neither_numba_nor_torch_nor_mpi():
    code = (
        "import sys, ringlet.ring.float16, ringlet.ring.transports.local;"
        "import ringlet.ring.transports.gloo, ringlet.ring.transports.mpi;"
        "print([m for m in ('numba', 'torch', 'mpi4py.MPI') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
