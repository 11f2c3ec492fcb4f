"""Chains: one compressor behind another, however deep, and the errors of those that cannot be."""

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import (
    Chain,
    Compressor,
    CompressorError,
    Context,
    Int8,
    NoCompression,
    Part,
    Round,
    SharedInt,
    SignSGD,
    TopK,
    Traits,
    parse,
)
from ringlet.compressors.testing import check_compressor
from ringlet.compressors.testing.tools.simulate import context, decode, encode, simulate

SPECS = [
    "topk(ratio=0.3) | int8",
    "topk(ratio=0.3) | topk(ratio=0.5)",
    "topk(ratio=0.5) | topk(ratio=0.5) | int8",
    "threshold(value=0.3) | topk(ratio=0.5) | int4",
    "threshold(value=0.3) | lossless",
    "block_topk(ratio=0.25, block=64) | topk(ratio=0.5) | fp8",
    "topk(ratio=0.5) | threshold(value=0.5) | int8",
]
ROUNDS = [
    "powersgd(rank=2) | shared_int",
    "powersgd(warm_start=False) | shared_int(stochastic=True) | ef",
    "powersgd | ef | shared_int(bits=16)",
    "acpsgd | terngrad_shared | ef",
]


@pytest.mark.parametrize("spec", [*SPECS, *ROUNDS])
def test_conformance(spec):
    check_compressor(spec)


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
    """Send every second value, by turns, under a name of its own."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("evens", "float32", (n + 1) // 2),)

    def chained_part(self):
        return "evens"

    def compress(self, x, ctx):
        values = np.roll(x, -(ctx.step % 2))[::2].copy()
        if not np.isfinite(x).all():
            values[:] = np.nan
        return {"evens": values}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[::2] = payload["evens"]
        out[:] = np.roll(out, ctx.step % 2)


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


class Rounds(Compressor):
    """The mean of the values in one round, of half of them as a sum, and the largest of all."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        half, share = x.size // 2, x.copy()
        out[:half] = (yield Round(x[:half].copy(), "sum", share[:half])) / np.float32(ctx.size)
        out[half:] = yield Round(x[half:].copy(), "mean", share[half:])
        ctx.state["largest"] = float((yield Round(np.abs(x).max(keepdims=True), "max"))[0])
        if local is not None:
            local[:] = share


@given(n=st.integers(2, 700), size=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_what_stands_behind_rounds_takes_the_place_of_their_means_and_sums(n, size, seed):
    rng = np.random.default_rng(seed)
    gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(size)]
    states, shares = [{} for _ in gradients], []
    behind = SharedInt(bits=16, bucket=32)
    outs = simulate(Rounds() | behind, gradients, states, shares=shares)
    mean = np.mean(np.asarray(gradients, np.float64), axis=0)
    largest = float(np.abs(gradients).max())
    most = 0.5001 * largest / behind.steps(size) + largest * 2.0**-23  # and float32's rounding
    assert np.abs(outs[0] - mean).max() <= most
    assert n < 40 or np.abs(outs[0] - mean).max() > 0  # it did travel in 16 bits
    np.testing.assert_allclose(np.mean(shares, axis=0, dtype=np.float64), outs[0], atol=1e-6)
    for share, x in zip(shares, gradients, strict=True):
        assert np.abs(share - x.astype(float)).max() <= most
    for out, state in zip(outs, states, strict=True):
        np.testing.assert_array_equal(out, outs[0])
        assert state["largest"] == np.float32(largest)  # exactly: what is not added up stays


def test_factors_travel_as_integers():
    def sent(spec):
        x = np.random.default_rng(0).standard_normal(6400).astype(np.float32)
        ctx, out = Context(shape=(80, 80), numel=6400), np.empty(6400, np.float32)
        exchange, nbytes = parse(spec).exchange(x, out, ctx), 0
        with contextlib.suppress(StopIteration):
            asked = next(exchange)
            while True:
                nbytes += asked.values.nbytes
                asked = exchange.send(asked.values.copy())
        return nbytes, out

    (plain, exact), (quantised, near) = sent("powersgd"), sent("powersgd | shared_int")
    assert plain == 2 * 4 * 80 * 4
    assert quantised == plain / 4 + 2 * 4  # a scale for each factor
    assert np.linalg.norm(near - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("powersgd | int8", r"'powersgd \| shared_int'"),
        ("topk | shared_int", "cannot be chained behind the payloads of topk"),
        ("shared_int | shared_int(bits=16)", "nothing can be chained behind shared_int"),
        ("powersgd | powersgd", "remembers values"),
    ],
)
def test_rounds_are_chained_with_rounds_alone(spec, reason):
    with pytest.raises(CompressorError, match=reason):
        parse(spec)


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (lambda: parse("topk | signsgd"), r"signsgd changes the sum .* topk it would never see"),
        (lambda: TopK() | SignSGD(), "changes the sum of what ranks sent"),
        (lambda: Chain(first=TopK(), second=parse("int8 | ef")), "remembers values"),
    ],
)
def test_what_looks_at_whole_gradients_is_not_chained(chain, reason):
    """A vote, of which there would be none, and a memory of values that are others in each step."""
    with pytest.raises(CompressorError, match=reason):
        chain()


def test_both_sides_of_a_chain_may_change_with_the_steps():
    chain = parse("topk(ratio=0.1) | warmup(dense=2, steps=4, stages=2) | int8")
    every = [str(each) for each in chain.over_steps()]
    assert every[0] == "none"
    assert every[-1] == "topk(ratio=0.1) | int8"
    assert {str(chain.at(step)) for step in range(9)} == {*every}


class RunningScale(Int8):
    """Remembers a number, and nothing of what it did not send."""

    def traits(self):
        return dataclasses.replace(super().traits(), stateful=True)


def test_what_remembers_no_values_may_stand_behind_a_sparsifier():
    assert (TopK(ratio=0.1) | RunningScale()).traits().stateful
