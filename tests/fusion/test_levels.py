"""The engine over two levels: dense inside a host, compressed between hosts."""

import copy

import numpy as np
import pytest
from engines import on_hosts
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import CompressionFailed, Request
from ringlet.fusion.buckets.two_level import TwoLevelBucket
from ringlet.fusion.planning import pieces
from ringlet.ring import ReduceOp

HOSTS = ["aabb", "abab", "aabbcc", "aaabbb"]
SPECS = [
    "int8(bucket=32)", "int8(bucket=32) | ef", "topk(ratio=0.2) | ef", "onebit(bucket=64) | ef",
    "int8(bucket=32) | ef(dtype='int8')", "mxfp4", "int8(bucket=32) | ef21",
    "topk(ratio=0.2) | int8(bucket=32) | ef", "fp16", "none",
]  # fmt: skip


def gradient(rank, step, n, dtype="float32"):
    return np.random.default_rng([rank, step, n]).standard_normal(n).astype(dtype)


def train(
    engine, specs, sizes, steps=3, states=None, begin=0, op=ReduceOp.AVERAGE, dtype="float32"
):
    states = [{} for _ in sizes] if states is None else states
    requests = [
        Request(f"t{i}", shape=(n,), spec=spec, op=op, dtype=dtype)
        for i, (n, spec) in enumerate(zip(sizes, specs, strict=True))
    ]
    group = engine.declare("g", requests, [parse(spec) for spec in specs], states)
    results = []
    for step in range(begin, begin + steps):
        arrays = [gradient(engine.rank, step, n, dtype) for n in sizes]
        for request, array in zip(requests, arrays, strict=True):
            group.submit(request.name, array)
        group.wait(60)
        results += arrays
    return results, states, [type(bucket) for bucket in group.buckets]


@settings(max_examples=30)
@given(
    st.sampled_from(HOSTS),
    st.lists(st.tuples(st.sampled_from(SPECS), st.integers(1024, 3000)), min_size=1, max_size=4),
    st.sampled_from([ReduceOp.AVERAGE, ReduceOp.SUM]),
    st.sampled_from(["float32", "float16"]),
    st.integers(1, 20_000),
)
def test_replicas_are_bit_equal_and_near_the_exact_result(hosts, tensors, op, dtype, threshold):
    specs, sizes = zip(*tensors, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 600)
        found = on_hosts(
            hosts,
            lambda engine: train(engine, specs, sizes, op=op, dtype=dtype),
            fusion_threshold=threshold,
        )
    for results, states, kinds in found:
        for array, other in zip(results, found[0][0], strict=True):
            np.testing.assert_array_equal(array, other)
        assert kinds == found[0][2]
        assert [state.get("step", 0) for state in states] == [
            0 if spec == "none" else 3 for spec in specs
        ]
    scattered = sum(spec not in ("none", "fp16") for spec in specs)
    assert (found[0][2].count(TwoLevelBucket) > 0) == (scattered > 0)
    for i, (spec, n) in enumerate(tensors):
        gradients = [
            [gradient(rank, step, n, dtype).astype(np.float64) for rank in range(len(hosts))]
            for step in range(3)
        ]
        exact = [np.sum(each, axis=0) for each in gradients]
        exact = [each / len(hosts) if op is ReduceOp.AVERAGE else each for each in exact]
        results = found[0][0][i :: len(specs)]
        allowed = {"none": 5e-3, "fp16": 1e-2, "int8": 0.06}.get(spec.split("(")[0], 0.95)
        total = np.sum(results, axis=0, dtype=np.float64) - np.sum(exact, axis=0)
        assert np.linalg.norm(total) <= allowed * np.linalg.norm(np.sum(exact, axis=0))


@pytest.mark.parametrize("spec", ["int8(bucket=32) | ef", "topk(ratio=0.2) | ef"])
def test_residuals_are_of_shards_and_training_goes_on_from_them(spec):
    def through(engine):
        return train(engine, [spec], [2001], steps=4)[0]

    def in_two(engine):
        first, states, _ = train(engine, [spec], [2001], steps=2)
        (key,) = states[0].keys() - {"step"}
        residual = states[0][key]["residual"]
        assert residual.size == 2001 // 2 + (engine.rank in (0, 2))
        second = train(engine, [spec], [2001], 2, copy.deepcopy(states), begin=2)
        return first + second[0]

    for one, two in zip(on_hosts("aabb", through), on_hosts("aabb", in_two), strict=True):
        for array, other in zip(one, two, strict=True):
            np.testing.assert_array_equal(array, other)


def test_replicas_stay_equal_when_all_but_one_rank_start_anew_at_a_later_step():
    """What ranks draw together is keyed by the step, which is the tensor's, not the shard's."""

    def body(engine):
        specs = ["int4(bucket=64) | hadamard(block=64) | ef"]
        states = train(engine, specs, [4096], steps=3)[1]
        if engine.rank != 0:
            states = [{"step": 3}]
        return train(engine, specs, [4096], 2, states, begin=3)[0]

    found = on_hosts("aabb", body)
    for results in found:
        for array, other in zip(results, found[0], strict=True):
            np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("collective", ["allgather", "scatter_reduce"])
def test_a_forced_collective_is_the_tensors_own(collective):
    def body(engine, company):
        names = ["w", *company]
        requests = [
            Request(n, shape=(3000,), spec="int8", collective=collective if n == "w" else "auto")
            for n in names
        ]
        group = engine.declare("g", requests, [parse("int8")] * len(names), [{} for _ in names])
        x = gradient(engine.rank, 0, 3000)
        for name in names:
            group.submit(name, x.copy() if name != "w" else x)
        group.wait(60)
        return x

    alone = on_hosts("aabb", lambda engine: body(engine, []))
    together = on_hosts("aabb", lambda engine: body(engine, ["u", "v"]))
    np.testing.assert_array_equal(alone[0], together[0])


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_plugin_that_fails_on_one_rank_fails_the_step_on_all(stage, declared, brittle, reducer):
    def body(engine):
        reduce = reducer(engine, 3000, declared)

        def step():
            x = np.full(3000, engine.rank, np.float32)
            reduce(x)
            np.testing.assert_array_equal(x, np.full(3000, 2.5, np.float32))

        def sync():
            engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)

        step()
        sync()
        if engine.rank == 3:
            brittle["when"] = lambda ctx: (ctx.stage, ctx.name) == (stage, "w/1")
        sync()
        with pytest.raises(CompressionFailed) as caught:
            step()
        sync()
        brittle.clear()
        sync()
        step()
        return str(caught.value)

    (text,) = set(on_hosts("aabbcc", body))
    assert text.startswith("rank ")
    assert "'w/1'" in text
    assert "lost my keys" in text


@pytest.mark.parametrize("n", [1, 3, 1500])
@pytest.mark.parametrize("spec", ["topk(ratio=0.2) | ef21", "int8(bucket=32) | ef21"])
def test_a_shard_that_is_smaller_than_what_is_compressed_is_seen_all_the_same(spec, n):
    spec = f"{spec} | min_size({max(1, n - 100)})"
    exact = np.mean([gradient(rank, 0, n) for rank in range(4)], axis=0)

    def body(engine):
        group = engine.declare("g", [Request("w", shape=(n,), spec=spec)], [parse(spec)], [{}])
        for _ in range(20):  # gradients that stand still are approximated ever better
            x = gradient(engine.rank, 0, n)
            group.submit("w", x)
            group.wait(60)
        assert [type(bucket) for bucket in group.buckets] == [TwoLevelBucket]
        return x

    for found in on_hosts("aabb", body):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)
