"""Large tensors travel in pieces, and nobody can tell from the result."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import Compressor, Context, parse, register
from ringlet.compressors.modifiers.residuals import wide
from ringlet.compressors.specs import registry
from ringlet.fusion import CompressionFailed, Engine, Limits, Request
from ringlet.fusion.devices.host import Place
from ringlet.fusion.planning import pieces
from ringlet.fusion.planning.member import Member
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

EXACT = [
    "fp16", "bf16", "int8(bucket=32)", "int4(bucket=64)", "fp8(block=32)", "onebit(bucket=64)",
    "mxfp6",
]  # fmt: skip
OTHERS = [
    "int8(bucket=32) | ef",
    "natural(bucket=64) | ef",
    "int8(bucket=32) | server_ef",
    "fp16 | ef",
    "int4(bucket=32) | ef(dtype='int8')",
    "mxfp4 | ef(dtype='bf16', reset=2)",
]
WHOLE = ["none", "topk", "powersgd", "int8(bucket=32) | ef21", "randomk"]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 100)


def train(comm, specs, sizes, steps=2, states=None, begin=0, single=False, **limits):
    """Reduce normal gradients; return every step's results and what compressors remember."""
    engine = Engine(comm, open_control, Limits(**limits))
    states = [{} for _ in sizes] if states is None else states
    names = [f"t{i}" for i in range(len(sizes))]
    requests = [
        Request(name, shape=(n,), spec=spec)
        for name, n, spec in zip(names, sizes, specs, strict=True)
    ]
    results = []
    try:
        group = None if single else engine.declare("g", requests, list(map(parse, specs)), states)
        for step in range(begin, begin + steps):
            rng = np.random.default_rng([step, comm.rank])
            arrays = [rng.standard_normal(n, dtype=np.float32) for n in sizes]
            if group is None:
                handles = [
                    engine.submit(request, array, None, parse(spec))
                    for request, array, spec in zip(requests, arrays, specs, strict=True)
                ]
                results += [handle.wait(60).copy() for handle in handles]
            else:
                for name, array in zip(names, arrays, strict=True):
                    group.submit(name, array)
                group.wait(60)
                results += arrays
    finally:
        engine.shutdown()
    return results, states


@given(st.sampled_from(EXACT + OTHERS + WHOLE), st.integers(1, 3000))
def test_pieces_cover_a_tensor_and_begin_where_payloads_may_be_cut(spec, n):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 100)
        request = Request("w", shape=(n,), spec=spec)
        member = Member(request, parse(spec), 0, 3, 0, Place())
        found = pieces.divide(member)
    if spec in WHOLE or n < 200 or member.compressor != parse(spec):
        assert found == [member]
        return
    ends = [piece.start + piece.numel for piece in found]
    assert [piece.start for piece in found] == [0, *ends[:-1]]
    assert ends[-1] == n
    granularity = member.compressor.traits().granularity
    assert all(piece.start % granularity == 0 for piece in found)
    assert all(100 <= piece.numel < 100 + granularity for piece in found[:-1])


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_pieces_give_the_bits_that_the_whole_does(size, single, monkeypatch):
    """Where nothing is drawn and nothing remembered of sums, which shards cut differently."""
    sizes = [1500, 1070, 1999, 2048, 3250, 1640, 2100]

    def body(comm):
        return train(comm, EXACT, sizes, single=single, fusion_threshold=2000)[0]

    whole = run_local(body, size)
    monkeypatch.setattr(pieces, "PIECE", 100)
    divided = run_local(body, size)
    for rank in range(size):
        for array, other in zip(whole[rank], divided[rank], strict=True):
            np.testing.assert_array_equal(array, other)


@given(st.integers(2, 4), st.sampled_from(OTHERS), st.integers(1024, 3000), st.integers(1, 9000))
@settings(max_examples=15)
def test_replicas_are_bit_equal_and_steps_are_counted_once(size, spec, n, threshold):
    def body(comm):
        return train(comm, [spec], [n], steps=3, fusion_threshold=threshold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 100)
        found = run_local(body, size)
    for results, states in found:
        assert states[0]["step"] == 3
        if not spec.endswith("server_ef"):
            assert wide(states[0]).size == n
        for array, other in zip(results, found[0][0], strict=True):
            np.testing.assert_array_equal(array, other)
    exact = [
        np.mean(
            [
                np.random.default_rng([s, r]).standard_normal(n, dtype=np.float32)
                for r in range(size)
            ],
            axis=0,
        )
        for s in range(3)
    ]
    # With feedback what one step holds back the next ones send.
    assert np.linalg.norm(sum(found[0][0]) - sum(exact)) < 0.5 * np.linalg.norm(sum(exact))


@pytest.mark.parametrize("spec", OTHERS)
def test_training_goes_on_bit_for_bit_from_what_was_remembered(spec, small_pieces):
    def through(comm):
        return train(comm, [spec], [2000], steps=4)[0]

    def in_two(comm):
        first, states = train(comm, [spec], [2000], steps=2)
        return first + train(comm, [spec], [2000], 2, copy.deepcopy(states), begin=2)[0]

    for one, two in zip(run_local(through, 3), run_local(in_two, 3), strict=True):
        for array, other in zip(one, two, strict=True):
            np.testing.assert_array_equal(array, other)


def test_a_piece_that_fails_fails_the_tensor_and_the_next_step_counts_right(
    monkeypatch, small_pieces
):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    fault = {}

    @register("brittle")
    class Brittle(Compressor):
        def traits(self):
            return parse("int8(bucket=32)").traits()

        def layout(self, n):
            return parse("int8(bucket=32)").layout(n)

        def compress(self, x, ctx: Context):
            if fault.get("rank") == ctx.rank and ctx.offset >= fault["offset"]:
                raise KeyError("lost my keys")
            return parse("int8(bucket=32)").compress(x, ctx)

        def decompress(self, payload, out, ctx: Context):
            parse("int8(bucket=32)").decompress(payload, out, ctx)

    def body(comm):
        engine = Engine(comm, open_control, Limits(fusion_threshold=400))
        state, n = {}, 2000
        try:
            request = Request("w", shape=(n,), spec="brittle")
            group = engine.declare("g", [request], [parse("brittle")], [state])
            for step in range(4):
                if step == 1 and comm.rank == 1:
                    fault.update(rank=1, offset=500)
                x = np.full(n, comm.rank + 1.0, np.float32)
                group.submit("w", x)
                if step == 1:
                    with pytest.raises(CompressionFailed, match=r"rank 1: .*'w'"):
                        group.wait(60)
                    fault.clear()
                else:
                    group.wait(60)
                    np.testing.assert_allclose(x, 2.0, rtol=0.02)
                engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)
            return state["step"]
        finally:
            engine.shutdown()

    assert run_local(body, 3) == [3, 3, 3]
