"""Which collective is chosen: what the cost model says of a link, and who may overrule it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import CompressorError, NoCompression, parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.limits import Link
from ringlet.fusion.planning.strategy import DECODE, ENCODE, choose, effective
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

SHARDED = ["int8", "int4", "onebit", "fp8", "qsgd(bits=4)", "block_topk", "int8 | ef", "terngrad"]
TABLE = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels.json"

links = st.builds(Link, st.floats(0, 1), st.floats(1e4, 1e11))
numels = st.integers(1024, 10**9)


@given(st.sampled_from(SHARDED), numels, st.integers(1, 5000), st.integers(1, 5000), links)
def test_more_ranks_never_lead_back_to_the_all_gather(spec, numel, few, more, link):
    few, more = sorted((few, more))
    compressor = parse(spec)
    if choose(compressor, few, "auto", numel, link) == "scatter_reduce":
        assert choose(compressor, more, "auto", numel, link) == "scatter_reduce"


@given(st.sampled_from(SHARDED), st.integers(1, 10**5), st.integers(1, 10**5), st.integers(1, 99))
def test_larger_tensors_never_lead_back_to_the_all_gather(spec, few, more, size):
    few, more = sorted((few, more))
    compressor, link = parse(spec), Link(1e-4, 1e8)
    # Whole blocks: a payload is then the same fraction of every tensor.
    if choose(compressor, size, "auto", 8192 * few, link) == "scatter_reduce":
        assert choose(compressor, size, "auto", 8192 * more, link) == "scatter_reduce"


@given(st.sampled_from(SHARDED), st.integers(1024, 10**6), st.integers(1, 64))
def test_latency_favours_fewer_messages_and_bandwidth_fewer_bytes(spec, numel, size):
    compressor = parse(spec)
    assert choose(compressor, size, "auto", numel, Link(10.0, 1e9)) == "allgather"
    fewer = "scatter_reduce" if size > 2 else "allgather"
    assert choose(compressor, size, "auto", numel, Link(0.0, 1e5)) == fewer


@given(st.sampled_from(SHARDED), numels, st.integers(1, 64), links)
def test_what_is_forced_is_done_whatever_the_link(spec, numel, size, link):
    for forced in ("allgather", "scatter_reduce"):
        assert choose(parse(spec), size, forced, numel, link) == forced


@given(numels, st.integers(1, 64), links)
def test_where_there_is_no_choice_the_link_makes_none(numel, size, link):
    for spec, only in (("topk", "allgather"), ("fp16", "sum"), ("powersgd", "rounds")):
        compressor = parse(spec)
        assert choose(compressor, size, "auto", numel, link) == only
    with pytest.raises(CompressorError, match="cannot be cut into shards"):
        choose(parse("topk"), size, "scatter_reduce", numel, link)
    with pytest.raises(CompressorError, match="do not add up"):
        choose(parse("int8"), size, "sum", numel, link)
    with pytest.raises(CompressorError, match="'ring' is not one of"):
        choose(parse("int8"), size, "ring", numel, link)
    assert isinstance(effective(parse("int8"), "int64", numel), NoCompression)


@given(st.sampled_from(SHARDED), numels, st.integers(1, 64))
def test_on_an_unknown_link_the_rule_is_one_of_ranks(spec, numel, size):
    assert choose(parse(spec), size, "auto", numel) == (
        "scatter_reduce" if size > 2 else "allgather"
    )


def test_the_constants_are_those_of_the_measured_kernels():
    rows = json.loads(TABLE.read_text())["rows"]
    for constant, column in ((ENCODE, "encode"), (DECODE, "decode")):
        rates = [row[column] * 1e9 for row in rows]
        assert min(rates) <= 1 / constant <= max(rates)


@settings(max_examples=6)
@given(st.sampled_from(["int8", "onebit | ef"]), st.integers(3, 4))
def test_an_engine_reduces_as_its_link_demands(spec, size):
    n = 5000

    def reduce(comm, limits, collective):
        engine = Engine(comm, open_control, limits)
        try:
            request = Request("w", shape=(n,), spec=spec, collective=collective)
            group = engine.declare("g", [request], [parse(spec)], [{}])
            x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
            group.submit("w", x)
            group.wait(60)
            return x.tobytes(), group.plan.hash, engine.stats.wire_bytes
        finally:
            engine.shutdown()

    slow, thin = Limits(latency=1.0, bandwidth=1e9), Limits(latency=0.0, bandwidth=1e5)
    hashes = set()
    for limits, collective in ((slow, "allgather"), (thin, "scatter_reduce")):
        chosen = run_local(reduce, size, limits, "auto")
        forced = run_local(reduce, size, Limits(), collective)
        assert [(bits, wire) for bits, _, wire in chosen] == [(b, w) for b, _, w in forced]
        assert len({bits for bits, _, _ in chosen}) == 1
        hashes |= {digest for _, digest, _ in chosen}
    assert len(hashes) == 2  # the choice is part of the plan


@pytest.mark.parametrize("wanted", ["allgather", "scatter_reduce"])
def test_the_user_settles_the_choice_where_there_is_one(wanted):
    link = Limits(collective=wanted).link
    assert choose(parse("int8"), 4, "auto", 1 << 20, link) == wanted
    assert choose(parse("int8"), 2, "auto", 1 << 20, link) == wanted
    assert choose(parse("topk"), 4, "auto", 1 << 20, link) == "allgather"
    assert choose(parse("fp16"), 4, "auto", 1 << 20, link) == "sum"
    assert choose(parse("powersgd"), 4, "auto", 1 << 20, link) == "rounds"
    assert choose(parse("int8"), 4, "scatter_reduce", 1 << 20, link) == "scatter_reduce"


@pytest.mark.parametrize("spec", ["int8 | ef21", "int8 | momentum_correction", "onebit | ef"])
def test_what_is_remembered_of_a_tensor_is_not_taken_for_a_shard_of_it(spec):
    """The first shard has the number of the whole tensor, whose end of a step is another matter."""
    n = 4608

    def rank_main(comm):
        engine = Engine(comm, open_control, Limits(collective="scatter_reduce"))
        try:
            request = Request("w", shape=(n,), op=ReduceOp.SUM, spec=spec)
            group = engine.declare("model", [request], [parse(spec)], [{}])
            x = np.linspace(-1, 1, n, dtype=np.float32)
            for _ in range(3):
                out = x.copy()
                group.submit("w", out)
                group.wait(60)
            return out
        finally:
            engine.shutdown()

    first, *others = run_local(rank_main, 4)
    assert all(np.array_equal(first, other) for other in others)
    assert np.isfinite(first).all()
    assert np.corrcoef(first, np.linspace(-1, 1, n))[0, 1] > 0.5
