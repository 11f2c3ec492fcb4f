"""A process group of torch's for NCCL as a transport, with a stand-in for the group.

It says nothing about what torch or NCCL do on a GPU.
"""

import contextlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from standin.memory import device
from standin.torch_groups import Group

from ringlet.ring import PeerLost, ReduceOp
from ringlet.ring.interrupt import interrupter
from ringlet.ring.transports import torch_nccl
from ringlet.ring.transports.local import LocalWorld, run_local
from ringlet.ring.transports.torch_nccl import TorchNcclCommunicator

SIZE = 3


@pytest.fixture
def ranks(monkeypatch):
    """Run a function on three ranks, each with its communicator; return what they return."""
    here = threading.local()

    @contextlib.contextmanager
    def on_stream(torch_, number):
        here.gpu = number
        yield
        del here.gpu

    def in_order():
        return getattr(here, "gpu", None) == 5

    monkeypatch.setattr(torch_nccl, "_on_current_stream", on_stream)
    monkeypatch.setattr(torch_nccl, "_tensor", lambda _, a, __: torch.from_numpy(a.view(np.uint8)))
    # Subsets meet at torch's store, where the stand-ins of torch's groups find their ranks.
    meeting = {}

    def join(store, rank, size, options):
        return Group(meeting.setdefault(store, LocalWorld(size)).communicators[rank], in_order)

    join.Options = lambda: None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", join, raising=False)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: prefix)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)

    def run(function, owned=False):
        moving = LocalWorld(SIZE)  # what the group moves

        def rank(host):
            group = Group(moving.communicators[host.rank], in_order)
            comm = TorchNcclCommunicator(host, group, 5, owned)
            with contextlib.closing(comm):
                return function(comm)

        return run_local(rank, SIZE)

    return run


SUMS = [
    (np.float32, ReduceOp.SUM, [3, 3, 6]), (np.int64, ReduceOp.MAX, [2, 1, 2]),
    (np.uint32, ReduceOp.SUM, [3, 3, 6]), (np.float64, ReduceOp.PRODUCT, [0, 1, 8]),
]  # fmt: skip


def test_reductions(ranks):
    def work(comm):
        found = []
        for dtype, op, _ in SUMS:
            values = device([comm.rank, 1, 2], dtype)
            comm.allreduce(values, op)
            found.append(values.tolist())
        flags = device([comm.rank == 1, False], bool)
        comm.allreduce(flags)
        halves = device([0x3F80] * 2, np.uint16)  # ones
        comm.allreduce(halves, dtype="bfloat16")
        comm.allreduce(device([]))
        with pytest.raises(TypeError, match="no Max of uint32"):
            comm.allreduce(device([1], np.uint32), ReduceOp.MAX)
        with pytest.raises(TypeError, match="int16"):
            comm.allreduce(device([1], np.int16))
        return found, flags.tolist(), halves.tolist()

    expected = [want for _, _, want in SUMS], [True, False], [0x4040] * 2
    assert ranks(work) == [expected] * SIZE


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 0, 3], [0, 0, 0]])
def test_pieces(counts, ranks):
    total = sum(counts)

    def work(comm):
        mine = device(np.zeros(counts[comm.rank]))
        comm.reduce_scatter(device(np.arange(total) + comm.rank), mine, counts)
        whole = device(np.zeros(total), np.uint16)
        comm.allgather(mine.astype(np.uint16), whole, counts)
        return mine.tolist(), whole.tolist()

    expected = 3 * np.arange(total) + 3
    pieces = np.split(expected, np.cumsum(counts)[:-1])
    assert ranks(work) == [(piece.tolist(), expected.tolist()) for piece in pieces]


def test_exchanges_broadcasts_and_what_lies_on_the_host(ranks):
    def work(comm):
        send = device([10 * comm.rank + r for r in range(3) for _ in range(r)])
        out = device(np.zeros(3 * comm.rank))
        comm.alltoall(send, out, [0, 1, 2], [comm.rank] * 3)
        root = device([comm.rank] * 2, np.int16)
        comm.broadcast(root, 2)
        before = len(comm._group.calls)
        host = np.ones(2, np.float32)
        comm.allreduce(host)
        comm.barrier()
        assert len(comm._group.calls) == before == 2
        return out.tolist(), root.tolist(), host.tolist()

    expected = [[10 * s + r for s in range(3) for _ in range(r)] for r in range(3)]
    assert ranks(work) == [(piece, [2, 2], [3.0, 3.0]) for piece in expected]


def test_subsets_have_groups_of_their_own_which_end_with_them(ranks):
    def work(comm):
        ends, alone = comm.subset([0, 2]), comm.subset([1])
        mine = alone if ends is None else ends
        values = device([comm.rank])
        mine.allreduce(values)
        group = mine._group
        comm.close()
        assert comm._group is None
        return values.tolist(), None if group is None else group.ended

    assert ranks(work) == [([2], ["shutdown"]), ([1], None), ([2], ["shutdown"])]


@pytest.mark.parametrize("owned", [False, True])
def test_failures_are_lost_ranks_and_end_only_groups_of_our_own(owned, ranks):
    def work(comm):
        group = comm._group
        group.failing = RuntimeError("NCCL watchdog\nmore")
        with pytest.raises(PeerLost, match=f"allreduce .* rank {comm.rank}: NCCL watchdog$"):
            comm.allreduce(device([1]))
        with pytest.raises(PeerLost, match="NCCL watchdog"):
            comm.allreduce(device([1]))
        comm.close()
        return group.ended, group.calls

    assert ranks(work, owned) == [(["abort"] if owned else [], ["allreduce"])] * SIZE


def test_a_lost_rank_ends_what_waits(ranks):
    def work(comm):
        group = comm._group
        assert interrupter(comm) is not None
        comm.interrupt()
        with pytest.raises(PeerLost, match="another rank was lost"):
            comm.allreduce(device([1]))
        return group.ended

    assert ranks(work, owned=True) == [["abort"]] * SIZE
