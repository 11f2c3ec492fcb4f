"""Two levels: equal to the oracle, equal on all ranks, and how few bytes leave a host."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringlet.ring import ReduceOp, Topology
from ringlet.ring.collectives.compressed import encode, scatter_reduce
from ringlet.ring.collectives.seal import SEAL
from ringlet.ring.control.in_process import LocalControl
from ringlet.ring.control.opening import open_control
from ringlet.ring.dtypes import NAMES
from ringlet.ring.float16 import HALVES
from ringlet.ring.transports.hierarchical import LEAST, HierarchicalCommunicator
from ringlet.ring.transports.local import run_local

WORKER = runpy.run_path(str(Path(__file__).with_name("worker_collectives.py")))
CODEC = runpy.run_path(str(Path(__file__).with_name("test_compressed.py")))["Int8Codec"]


def two_levels(comm, hosts):
    return HierarchicalCommunicator(comm, Topology.from_hosts(comm.rank, hosts))


@settings(max_examples=150)
@given(
    hosts=st.sampled_from(["a", "ab", "aabb", "abab", "aaabbb", "abcabc", "aabbcc"]),
    kind=st.sampled_from(
        ["allreduce"] * 4 + ["reduce_scatter", "allgather", "alltoall", "broadcast"]
    ),
    dtype=st.sampled_from(NAMES),
    n=st.integers(0, 200) | st.integers(LEAST - 2, LEAST + 20000),
    op=st.sampled_from(WORKER["OPS"]),
    special=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_case_equals_the_oracle_on_every_rank(hosts, kind, dtype, n, op, special, seed):
    # Products of 16-bit floats may overflow inside a host and be finite over all.
    assume(not (dtype in HALVES and op == ReduceOp.PRODUCT))
    case = WORKER["Case"](kind, dtype, n, op, False, special, 0, seed, rounded=2)
    results = run_local(lambda comm: WORKER["play"](two_levels(comm, hosts), case), len(hosts))
    assert all(r == results[0] for r in results)


def test_the_subsets_are_those_of_the_topology_and_close_with_the_whole():
    def run(comm):
        two = two_levels(comm, "abab")
        assert (two.local.origin, two.local.rank) == (
            [(0, 2), (1, 3)][comm.rank % 2],
            comm.rank // 2,
        )
        assert (two.cross.origin, two.cross.rank) == (
            [(0, 1), (2, 3)][comm.rank // 2],
            comm.rank % 2,
        )
        inner = two.subset([1, 2])
        if inner is not None:
            total = np.ones(1)
            inner.allreduce(total)
            assert total[0] == 2
        two.barrier()
        two.close()
        assert two.local.closed
        assert two.cross.closed
        assert comm.closed

    run_local(run, 4)


@pytest.mark.parametrize(
    ("hosts", "ranks", "levels"),
    [("aabb", [0, 1, 2, 3], True), ("abcabc", [0, 2, 3, 5], True), ("aabb", [0, 1], False),
     ("aabb", [1, 2], False), ("aabb", [0, 1, 2], False)],
)  # fmt: skip
def test_subsets_have_two_levels_where_their_hosts_allow_it(hosts, ranks, levels):
    def run(comm):
        two = two_levels(comm, hosts)
        assert (two.base, two.flat) == (comm, comm)
        subset = two.subset(ranks)
        if subset is None:
            return
        assert isinstance(subset, HierarchicalCommunicator) == levels
        assert subset.origin == tuple(ranks)
        total = np.arange(LEAST)
        subset.allreduce(total)
        np.testing.assert_array_equal(total, len(ranks) * np.arange(LEAST))
        subset.close()

    run_local(run, len(hosts))


def test_the_control_plane_is_that_of_the_transport():
    class Echo:
        def on_message(self, rank, message):
            return [b"%d: " % rank + message]

        def on_lost(self, rank, why=""):
            return []

    def run(comm):
        two = two_levels(comm, "aabb")
        control = open_control(two, Echo() if comm.rank == 0 else None)
        assert type(control) is LocalControl
        if comm.rank == 3:
            control.send(b"here")
        told = control.receive(60.0)
        control.close()
        return told

    assert run_local(run, 4) == [[b"3: here"]] * 4


def test_connections_that_have_ended_are_told_of_every_level():
    def run(comm):
        two = two_levels(comm, "abab")
        before = two.severed()
        two.cross.severed = lambda: [3]
        two.flat.severed = lambda: [1, 3]
        found = [before, two.severed()]
        two.local.severed = lambda: [2]
        return [*found, two.severed()]

    assert run_local(run, 4) == [[[], [1, 3], [1, 2, 3]]] * 4


def test_unequal_hosts_and_foreign_topologies_are_refused():
    with pytest.raises(ValueError, match="2 on a, 1 on b"):
        run_local(lambda comm: two_levels(comm, "aab"), 3)
    with pytest.raises(ValueError, match="of 2 ranks, the communicator of 3"):
        run_local(
            lambda comm: HierarchicalCommunicator(comm, Topology.from_hosts(0, ["a", "b"])), 3
        )


@pytest.mark.parametrize("hosts", ["aabb", "aaabbb", "aabbcc", "abcdabcd"])
def test_compressed_between_hosts_sends_a_local_size_th_of_the_flat_bytes(hosts):
    n, size = 48 * 100, len(hosts)
    local_size = hosts.count("a")
    gradients = [np.random.default_rng(r).normal(size=n).astype(np.float32) for r in range(size)]

    def run(comm):
        two = two_levels(comm, hosts)
        counts = [n // local_size] * local_size
        shard = np.empty(counts[0], np.float32)
        two.reduce_within(gradients[comm.rank], shard, counts)
        codec = CODEC(shard, two.cross.size)
        sent = scatter_reduce(two.cross, codec, encode(codec))
        result = np.empty(n, np.float32)
        two.gather_within(codec.output, result, counts)
        return sent, result

    results = run_local(run, size)
    assert len({result.tobytes() for _, result in results}) == 1
    exact = np.sum(gradients, axis=0, dtype=np.float64)
    step = np.abs(exact).max() / 127
    assert np.abs(results[0][1] - exact).max() <= step * (len(set(hosts)) + 1)
    # Flat: every rank sends a part to each rank of another host, and its sum to each of them.
    flat = size * 2 * (size - local_size) * (4 + n // size + SEAL)
    scales = 2 * size * size * (4 + SEAL)  # what does not shrink with the parts
    assert sum(sent for sent, _ in results) <= flat / local_size + scales


def test_an_average_is_the_callers_business():
    with pytest.raises(ValueError, match="op must be"):
        run_local(lambda c: two_levels(c, "ab").allreduce(np.ones(2), ReduceOp.AVERAGE), 2)


def test_what_waits_is_ended_on_every_level():
    """NCCL's levels have connections of their own, which ending others does not end."""

    def body(comm):
        levels = two_levels(comm, "aabb")
        ended = []
        for name in ("flat", "local", "cross"):
            level = SimpleNamespace(interrupt=lambda name=name: ended.append(name), close=id)
            setattr(levels, name, level)
        levels.interrupt()
        return sorted(ended)

    assert run_local(body, 4) == [["cross", "flat", "local"]] * 4
