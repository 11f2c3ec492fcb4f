"""What averages are divided by while ranks have joined, against NumPy in float64."""

import sys

import cloudpickle
import numpy as np
import pytest
from engines import with_engines

import ringlet
from ringlet.compressors import parse
from ringlet.compressors.specs.registry import lookup, names
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.requests.request import dumps, loads
from ringlet.ring import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

pytestmark = pytest.mark.preloaded("torch")

SIZE, LATE = 3, 2  # ranks, and the one that has no data after the first step
EPS = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}


def values(rank, step, n, dtype="float32"):
    rng = np.random.default_rng([rank, step, n])
    if dtype in EPS:
        x = rng.normal(size=n).astype(np.float32)
        if dtype == "bfloat16":
            return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return x.astype(dtype)
    return rng.integers(-100, 100, n).astype(dtype)


def wide(array, dtype):
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def run(spec, declared, divisor, dtype="float32", n=3000, op=ReduceOp.AVERAGE, **limits):
    """Return rank 0's results of a step with all ranks, and of two without the last one."""

    def body(engine):
        request = Request("w", dtype=dtype, shape=(n,), spec=spec, op=op)
        compressor = parse(spec)
        group = engine.declare("g", [request], [compressor], [{}]) if declared else None
        results = []
        for step in range(1 if engine.rank == LATE else 3):
            x = values(engine.rank, step, n, dtype)
            if group is None:
                engine.submit(request, x, compressor=compressor).wait(60)
            else:
                group.submit("w", x)
                group.wait(60)
            results.append(wide(x, dtype))
        engine.join()
        x = values(engine.rank, 3, n, dtype)
        if group is None:
            engine.submit(request, x, compressor=compressor).wait(60)
        else:
            group.submit("w", x)
            group.wait(60)
        return [*results, wide(x, dtype)]

    results = with_engines(SIZE, body, join_divisor=divisor, **limits)
    assert [r.tobytes() for r in results[0]] == [r.tobytes() for r in results[1]]
    assert results[LATE][-1].tobytes() == results[0][-1].tobytes()
    return results[0]


def exact(step, n, dtype, divisor, op=ReduceOp.AVERAGE):
    ranks = range(SIZE) if step in (0, 3) else range(LATE)
    total = np.sum([wide(values(r, step, n, dtype), dtype) for r in ranks], axis=0)
    if op is ReduceOp.AVERAGE:
        total = total / (SIZE if divisor == "all" else len(ranks))
    return total if dtype in EPS else np.trunc(total)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("divisor", ["all", "contributors"])
@pytest.mark.parametrize(
    ("dtype", "n"),
    [
        *((dtype, 40_000) for dtype in ("float32", "float64", "float16", "int8")),
        *((dtype, 300) for dtype in ("float32", "bfloat16", "int32", "int64")),
    ],
)
def test_plain_averages_are_those_of_numpy(declared, divisor, dtype, n):
    for step, got in enumerate(run("none", declared, divisor, dtype, n)):
        expected = exact(step, n, dtype, divisor)
        if dtype in EPS:
            np.testing.assert_allclose(got, expected, rtol=EPS[dtype], atol=EPS[dtype])
        else:
            assert (got == expected).all()


@pytest.mark.parametrize(
    ("spec", "near", "dtype", "declared"),
    [
        ("fp16", 2e-3, "float32", False),
        ("fp16", 2e-3, "float32", True),
        ("fp16", 2e-3, "float16", True),
        ("bf16", 2e-2, "float32", True),
        ("fp16 | ef", 2e-3, "float32", True),
        ("int8", 0.02, "float32", False),
        ("int8", 0.02, "float16", True),
        ("shared_int", 0.05, "float32", True),
    ],
)
def test_compressed_averages_are_near_those_of_numpy(spec, near, dtype, declared):
    for step, got in enumerate(run(spec, declared, "contributors", dtype)):
        expected = exact(step, 3000, dtype, "contributors")
        assert np.abs(got - expected).max() < near * np.abs(expected).max()


def specs():
    """Return every compressor, and every modifier behind one."""
    first = {"scaled": "randomk"}
    bare = [(name, lookup(name)().is_bound()) for name in names()]
    return [name if bound else f"{first.get(name, 'int8')} | {name}" for name, bound in bare]


@pytest.mark.parametrize(
    ("spec", "declared"),
    [*((spec, True) for spec in specs()), *((spec, False) for spec in ("topk | ef", "powersgd"))],
)
def test_every_compressor_is_divided_alike_and_remembers_the_same(spec, declared):
    everyone, contributors = run(spec, declared, "all"), run(spec, declared, "contributors")
    for step, (of_all, of_some) in enumerate(zip(everyone, contributors, strict=True)):
        factor = SIZE / LATE if step in (1, 2) else 1.0
        np.testing.assert_allclose(of_some, factor * of_all, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.ADASUM])
def test_other_operations_are_not_divided(op):
    every = run("none", False, "all", op=op), run("none", False, "contributors", op=op)
    for of_all, of_some in zip(*every, strict=True):
        assert of_all.tobytes() == of_some.tobytes()


def test_scales_and_large_tensors_in_pieces():
    n = (4 << 20) + 5

    def body(engine):
        request = Request("w", shape=(n,), spec="fp16", prescale=0.5, postscale=4.0)
        if engine.rank != LATE:
            x = np.full(n, 3.0, np.float32)
            engine.submit(request, x, compressor=parse("fp16")).wait(60)
        engine.join()
        return None if engine.rank == LATE else (x.min(), x.max())

    found = with_engines(SIZE, body, join_divisor="contributors")
    assert found == [(6.0, 6.0), (6.0, 6.0), None]


def test_a_rank_that_asked_before_it_joined_is_counted():
    """Rank 2 asks for "early" and joins; the others ask for that and for "late" afterwards."""
    coordinator = Coordinator(3)
    requests = [Request(name, shape=(5,)) for name in ("early", "late")]
    ask = [m.REQUEST + dumps([0, [request.to_list()]]) for request in requests]
    coordinator.on_message(2, ask[0])
    coordinator.on_message(2, m.JOIN + dumps(0))
    told = []
    for rank in (0, 1):
        for message in ask:
            told += coordinator.on_message(rank, message)
    found = {item[0]: item[4] for message in told for item in loads(message[1:])[2]}
    assert found == {"early": 3, "late": 2}


def test_cached_requests_are_told_by_how_many_ranks_asked():
    coordinator = Coordinator(3)
    requests = [Request(name, shape=(5,)) for name in "abcd"]
    asked = m.REQUEST + dumps([0, [request.to_list() for request in requests]])
    told = [message for rank in range(3) for message in coordinator.on_message(rank, asked)]
    ids = {item[0]: item[1] for message in told for item in loads(message[1:])[2]}
    hit = m.pack_hits(0, 1, sum(1 << i for i in ids.values()))
    (all_here,) = [each for rank in range(3) for each in coordinator.on_message(rank, hit)]
    assert all_here[:1] == m.EXECUTE_HITS
    coordinator.on_message(2, m.pack_hits(0, 1, 1 << ids["b"] | 1 << ids["d"]))
    coordinator.on_message(2, m.JOIN + dumps(0))
    coordinator.on_message(0, hit)
    (told,) = coordinator.on_message(1, hit)
    items = map(m.Item._make, loads(told[1:])[2])
    assert {item.name: item.contributors for item in items} == {"a": 2, "b": 3, "c": 2, "d": 3}


def test_votes_with_zeros_are_not_counted():
    coordinator = Coordinator(3)
    votes = [m.Vote(7, 0, 0, 10 + rank, absent=rank == 2) for rank in range(3)]
    told = [coordinator.on_message(rank, m.pack_vote(vote)) for rank, vote in enumerate(votes)]
    assert told[:2] == [[], []]
    assert m.unpack_go(told[2][0]) == m.Verdict(7, 0, 0, 2, (10, 11, 12))


def test_two_levels_divide_alike():
    from ringlet.ring.communicator import Topology
    from ringlet.ring.transports.hierarchical import HierarchicalCommunicator

    def body(comm):
        topology = Topology.from_hosts(comm.rank, ["a", "a", "b", "b"])
        levels = HierarchicalCommunicator(comm, topology)
        engine = Engine(
            levels, lambda _, h: open_control(comm, h), Limits(join_divisor="contributors")
        )
        try:
            found = []
            for name, spec in (("x", "none"), ("y", "int8")):
                x = np.full(1 << 15, 6.0, np.float32)
                if comm.rank != 3:
                    request = Request(name, shape=x.shape, spec=spec)
                    engine.submit(request, x, compressor=parse(spec)).wait(60)
                    found.append(float(np.abs(x - 6.0).max()))
            engine.join()
            return found
        finally:
            engine.shutdown()

    for errors in run_local(body, 4)[:3]:
        assert max(errors) < 0.1


def averages_while_a_rank_has_joined():
    """Return what a rank's gradients and single averages are while the last one has joined."""
    import torch

    import ringlet.torch as hvd

    torch.set_num_threads(1)
    found = []
    for divisor in (None, "contributors"):
        hvd.init(join_divisor=divisor)
        model = torch.nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if hvd.rank() < hvd.size() - 1:
            model(torch.full((1, 4), 3.0)).sum().backward()
            optimizer.step()
            found.append(float(model.weight.grad[0, 0]))
            found.append(float(hvd.allreduce(torch.tensor(3.0), name="x")))
        hvd.join()
        hvd.shutdown()
    return found


def test_training_with_a_rank_that_ran_out_of_data():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pytest.importorskip("torch")
    found = ringlet.run(averages_while_a_rank_has_joined, np=2, transport="gloo")
    assert found == [[1.5, 1.5, 3.0, 3.0], []]


def test_the_choice_is_named_where_it_is_none():
    from ringlet.job.settings import limits_from

    assert limits_from({}).join_divisor == "all"
    assert limits_from({"RINGLET_JOIN_DIVISOR": "contributors"}).join_divisor == "contributors"
    with pytest.raises(ValueError, match="RINGLET_JOIN_DIVISOR='mean' is not one of all, contr"):
        limits_from({"RINGLET_JOIN_DIVISOR": "mean"})
    with pytest.raises(ValueError, match="join_divisor"):
        Limits(join_divisor="mean")
