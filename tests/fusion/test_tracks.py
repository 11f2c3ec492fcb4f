"""Exchanges between ranks that are far apart: none waits for the messages of another."""

import threading

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.ring import PeerLost, ReduceOp
from ringlet.ring.collectives.reduce import allreduce_steps
from ringlet.ring.transports.local import LocalCommunicator, run_local

SPECS = ["none", "fp16", "int8 | ef", "topk(ratio=0.1) | ef", "powersgd(rank=2) | ef"]
SIZE = 3


def train(engine, steps=3):
    """Sum tensors of all specs, in many buckets; return what came of each step."""
    requests = [Request(f"t{i}", shape=(64, 32), spec=SPECS[i % len(SPECS)]) for i in range(20)]
    chosen = [parse(request.spec) for request in requests]
    group = engine.declare("g", requests, chosen, [{} for _ in requests])
    rng, found = np.random.default_rng([7, engine.rank]), []
    for step in range(steps):
        tensors = [rng.standard_normal(64 * 32, np.float32) for _ in requests]
        for request, tensor in zip(reversed(requests), reversed(tensors), strict=True):
            group.submit(request.name, tensor)
        single = np.full(5000, engine.rank + step, np.float32)
        handle = engine.submit(Request("single", shape=(5000,)), single)
        group.wait(60)
        found += [tensor.tobytes() for tensor in tensors] + [handle.wait(60).tobytes()]
    return found


def test_results_are_those_of_ranks_that_are_near(monkeypatch):
    limits = {"fusion_threshold": 1 << 14, "lookahead": 1 << 14}
    near = with_engines(SIZE, train, **limits)
    made = set()
    real = LocalCommunicator.sibling

    def sibling(self, number):
        made.add(number)
        return real(self, number)

    monkeypatch.setattr(LocalCommunicator, "sibling", sibling)
    monkeypatch.setattr(LocalCommunicator, "all_far", True)
    far = with_engines(SIZE, train, **limits)
    assert made == {1, 2, 3, 8, 16, 24}
    assert near == far
    assert far[0] == far[1] == far[2]


@pytest.mark.parametrize(("spec", "sums"), [("none", 2), ("fp16", 2), ("powersgd(rank=2)", 4)])
def test_a_sum_does_not_wait_for_the_one_before(spec, sums, monkeypatch):
    """One sum ends after another only; with a communicator in common nobody would come back."""
    monkeypatch.setattr(LocalCommunicator, "all_far", True)
    real, worlds, others_end = LocalCommunicator._allreduce, [], threading.Barrier(2 * SIZE)

    def allreduce(self, buffer, op, name):
        worlds.append(self.world)
        if self.world is worlds[0]:
            others_end.wait(60)
        real(self, buffer, op, name)
        if self.world is not worlds[0]:
            others_end.wait(60)

    def body(engine):
        requests = [Request(name, shape=(256, 64), spec=spec) for name in "ab"]
        group = engine.declare("g", requests, [parse(spec)] * 2, [{}, {}])
        assert len(group.buckets) == 2
        engine.submit(Request("ready", "barrier"), np.empty(0, np.float32)).wait(60)
        monkeypatch.setattr(LocalCommunicator, "_allreduce", allreduce)
        values = {name: np.full(256 * 64, engine.rank + 1.0, np.float32) for name in "ab"}
        for name in "ba":
            group.submit(name, values[name])
        group.wait(60)
        return [float(values[name].mean()) for name in "ab"]

    for means in with_engines(SIZE, body, fusion_threshold=1 << 15, lookahead=0):
        assert means == pytest.approx([2.0, 2.0])
    assert len({*worlds}) == sums


def test_a_rank_that_is_lost_ends_what_waits_on_any_track(monkeypatch):
    monkeypatch.setattr(LocalCommunicator, "all_far", True)
    real, lost = LocalCommunicator._alltoall, threading.Event()

    def alltoall(self, *args):
        if self.rank == 1 and lost.is_set():
            raise PeerLost("the cable was cut")
        return real(self, *args)

    def body(engine):
        train(engine, 1)
        engine.submit(Request("ready", "barrier"), np.empty(0, np.float32)).wait(60)
        lost.set()
        with pytest.raises(PeerLost):
            train(engine, 1)

    monkeypatch.setattr(LocalCommunicator, "_alltoall", alltoall)
    with_engines(SIZE, body, fusion_threshold=1 << 14)


@pytest.mark.parametrize(("gathered", "n"), [(0, 20_000), (1 << 18, 20_000), (1 << 18, 30_000)])
def test_what_is_gathered_at_once_is_not_sent_in_two_messages(gathered, n, monkeypatch):
    monkeypatch.setattr(LocalCommunicator, "gathered", gathered)
    monkeypatch.setattr(LocalCommunicator, "reduces", lambda *_: False)

    def body(comm):
        x = np.full(n, comm.rank + 1.0, np.float32)
        room = np.empty(2 * x.nbytes, np.uint8)
        steps = allreduce_steps(lambda _: comm, x, ReduceOp.SUM, "float32", lambda k: room[:k])
        wires = 0
        for wire in steps:
            wire.call()
            wires += 1
        return wires, float(x.min()), float(x.max())

    wires = 1 if n * 4 * SIZE < gathered else 2
    assert run_local(body, SIZE) == [(wires, 6.0, 6.0)] * SIZE
