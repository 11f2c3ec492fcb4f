"""Tensors of more elements than 32 bits count: counted in 64 bits, or refused."""

import numpy as np
import pytest
from numba import TypingError

from ringlet.compressors import CompressorError, Context, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.kernels.cpu.sparsifiers import topk
from ringlet.compressors.testing.tools.simulate import decode, encode

HUGE = [2**31, 2**32, 2**32 + 7]


@pytest.mark.parametrize("spec", ["topk", "randomk", "topk | int8"])
@pytest.mark.parametrize("n", HUGE)
def test_what_numbers_entries_in_31_bits_refuses_more_when_it_is_planned(spec, n):
    compressor = parse(spec)
    assert compressor.layout(2**31 - 1)
    with pytest.raises(CompressorError, match=f"31 bits, which {n} elements exceed"):
        compressor.layout(n)


@pytest.mark.parametrize("spec", ["threshold", "topk_sampled", "sidco", "lossless"])
@pytest.mark.parametrize("n", HUGE)
def test_what_has_no_layout_refuses_before_it_looks_at_a_value(spec, n):
    x = np.broadcast_to(np.float32(1), (n,))  # of four bytes
    with pytest.raises(CompressorError, match=f"31 bits, which {n} elements exceed"):
        type(parse(spec)).compress.__wrapped__(parse(spec), x, Context(shape=(n,), numel=n))


@pytest.mark.parametrize("n", HUGE)
def test_what_works_bucket_by_bucket_has_no_limit(n):
    for spec in ("int8", "bf16", "natural", "onebit", "fp8", "block_topk", "terngrad"):
        assert sum(part.elements for part in parse(spec).layout(n)) > n / 100


@pytest.mark.parametrize(
    "spec",
    ["int4(stochastic=True)", "qsgd", "natural", "terngrad", "int8 | hadamard", "minmax"],
)
@pytest.mark.parametrize("offset", [2**31 - 4096, 2**31, 2**32, 2**32 + 2**20, 2**40])
def test_pieces_far_behind_are_compressed_as_array_code_does(spec, offset):
    """Counters of random numbers go on beyond 32 bits: no piece repeats an earlier one's."""
    compressor = parse(spec)
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)

    def at(place):
        return Context(shape=(2**41,), numel=2**41, offset=place)

    fast, slow = encode(compressor, x, at(offset)), compressor.compress(x, at(offset))
    for name, array in fast.items():
        np.testing.assert_array_equal(array, slow[name])
    assert np.isfinite(decode(compressor, fast, x.size, at(offset))).all()
    if spec not in ("minmax",):
        near, again = (empty_payload(compressor, x.size, at(0)) for _ in range(2))
        compressor.encode_into(x, near, at(offset % 2**32))
        compressor.encode_into(x, again, at(offset))
        alike = all((near[name] == again[name]).all() for name in near)
        assert alike == (offset < 2**32)


def test_the_search_counts_what_is_allowed():
    values = np.arange(1000, dtype=np.int32)
    assert topk.kth(values, 10, 0)[0] == 990


@pytest.mark.parametrize("gaps", [lambda x: np.repeat(x, 2)[::2], lambda x: x[::-1]])
def test_arrays_with_gaps_are_refused_by_kernels_that_load_many_at_once(gaps):
    x = gaps(np.random.default_rng(0).standard_normal(4096).astype(np.float32))
    compressor, ctx = parse("topk"), Context(shape=(4096,), numel=4096)
    with pytest.raises(TypingError, match="contiguous"):
        compressor.encode_into(x, empty_payload(compressor, 4096, ctx), ctx)
