"""Chains: one compressor behind another, however deep, and the errors of those that cannot be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import (
    Chain,
    Compressor,
    CompressorError,
    Int8,
    NoCompression,
    Part,
    TopK,
    Traits,
    parse,
)
from ringlet.compressors.testing import check_compressor, parametrize_with_checks
from ringlet.compressors.testing.simulate import context, decode, encode

SPECS = [
    "topk(ratio=0.3) | int8",
    "topk(ratio=0.3) | topk(ratio=0.5)",
    "topk(ratio=0.5) | topk(ratio=0.5) | int8",
    "threshold(value=0.3) | topk(ratio=0.5) | int4",
    "threshold(value=0.3) | lossless",
    "block_topk(ratio=0.25, block=64) | topk(ratio=0.5) | fp8",
    "topk(ratio=0.5) | threshold(value=0.5) | int8",
]


@parametrize_with_checks(SPECS)
def test_conformance(compressor, check):
    check(compressor)


@pytest.mark.parametrize("spec", SPECS)
@given(n=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_a_chain_decodes_stage_after_stage(spec, n, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    chain = parse(spec)
    out = decode(chain, encode(chain, x, context(x)), n, context(x))
    payload = chain.first.compress(x, context(x))
    values, ctx = payload[chain.part], context(x)
    inner = ctx.child("chain", values.size)
    sent = decode(chain.second, encode(chain.second, values, inner), values.size, inner)
    expected = decode(chain.first, payload | {chain.part: sent}, n, ctx)
    np.testing.assert_array_equal(out, expected)


def test_nested_chains_are_the_same_however_they_are_built():
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    left = parse("topk(ratio=0.5) | topk(ratio=0.5) | int8")
    right = Chain(first=TopK(0.5), second=Chain(first=TopK(0.5), second=Int8()))
    assert [p.name for p in left.layout(500)] == [
        "indices", "values.indices", "values.values.codes", "values.values.scales",
    ]  # fmt: skip
    assert left.layout(500) == right.layout(500)
    outs = [decode(c, encode(c, x, context(x)), 500, context(x)) for c in (left, right)]
    np.testing.assert_array_equal(*outs)


def test_a_chain_is_dense_while_its_first_part_is():
    chain = parse("topk | warmup(dense=2) | int8")
    assert chain.at(0) == chain.at(1) == NoCompression()
    assert chain.at(2) == parse("topk | int8")


class Evens(Compressor):
    """Send every second value under a name of its own."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("evens", "float32", (n + 1) // 2),)

    def chained_part(self):
        return "evens"

    def compress(self, x, ctx):
        values = x[::2].copy()
        if not np.isfinite(x).all():
            values[:] = np.nan
        return {"evens": values}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[::2] = payload["evens"]


class Unnamed(Evens):
    def chained_part(self):
        return super(Evens, self).chained_part()


class Variable(Evens):
    """The same without a fixed size: how many values there are, nobody can tell."""

    def traits(self):
        return Traits()


class Mistaken(Variable):
    def chained_part(self):
        return "odds"


def test_a_plugin_names_the_part_that_is_compressed():
    chain = Evens() | Int8()
    assert [p.name for p in chain.layout(7)] == ["evens.codes", "evens.scales"]
    check_compressor(chain)


def test_a_plugin_that_sends_no_values_is_refused_when_it_is_chained():
    with pytest.raises(CompressorError, match=r"nothing can be chained behind .*Unnamed"):
        Unnamed() | Int8()


def test_a_plugin_of_variable_size_says_how_many_values_it_sends():
    x = np.ones(10, np.float32)
    chain = Variable() | Int8()
    payload = chain.compress(x, context(x))
    with pytest.raises(CompressorError, match=r"define chained_count"):
        chain.decompress(payload, x, context(x))
    with pytest.raises(CompressorError, match=r"sends \['evens'\] and no 'odds'"):
        (Mistaken() | Int8()).compress(x, context(x))
