"""NCCL without a GPU: its library, and the communicator over a stand-in that moves host memory."""

import re
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from standin.memory import device
from standin.nccl import StandIn, World

import ringlet.ring.transports.nccl as module
from ringlet.ring import PeerLost, ReduceOp, RingError, Topology, TransportUnavailable
from ringlet.ring.interrupt import interrupter
from ringlet.ring.launch.start import choose_transport
from ringlet.ring.rendezvous.connect import connect, gpu_of
from ringlet.ring.rendezvous.environment import Launched
from ringlet.ring.transports import nccl_library
from ringlet.ring.transports.gpu import on_device
from ringlet.ring.transports.hierarchical import LEAST as LEVELS_FROM
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.local import LocalWorld
from ringlet.ring.transports.nccl import NcclCommunicator
from ringlet.ring.transports.nccl_library import (
    ID_BYTES,
    IN_PROGRESS,
    LEAST,
    REMOTE_ERROR,
    Lacking,
    lacking,
    load,
)

SIZE = 3  # ranks

needs_nccl = pytest.mark.skipif(
    load() is None, reason="needs NCCL: pip install nvidia-nccl-cu12 (or -cu13)"
)


@needs_nccl
def test_the_library_tells_its_version_and_makes_ids(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    library = load()
    assert library.version() >= LEAST
    ids = {library.unique_id() for _ in range(3)}
    assert {len(made) for made in ids} == {ID_BYTES}
    assert len(ids) == 3
    assert "invalid argument" in library.explain(4, 0)


def test_without_a_gpu_it_is_said_what_is_missing():
    missing = lacking()
    if missing is None:
        pytest.skip("there is a GPU here")
    assert missing.why
    assert missing.remedy
    with pytest.raises(TransportUnavailable, match="transport 'nccl' is not available"):
        connect("nccl")
    with pytest.raises(TransportUnavailable):
        NcclCommunicator(LocalWorld(1).communicators[0])


def test_the_launcher_says_what_is_missing_before_it_starts_anything(monkeypatch):
    monkeypatch.setattr(nccl_library, "lacking", lambda gpu: Lacking("cupy is not here", "Get it."))
    with pytest.raises(TransportUnavailable, match=r"'nccl' is not available: cupy.*Get it\."):
        choose_transport("nccl")
    monkeypatch.setattr(nccl_library, "lacking", lambda gpu: None)
    assert choose_transport("nccl") == ("nccl", None)


class Gpu:
    """What the communicator uses of CuPy."""

    class Event:
        ptr = 1

        def __init__(self, disable_timing):
            pass

        def record(self, stream):
            pass

    class runtime:  # noqa: N801 - a module of CuPy's
        CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
        state = 0

        shared = False

        @staticmethod
        def getDevice():
            return 0

        @classmethod
        def eventQuery(cls, event):
            return cls.state

        @classmethod
        def deviceGetPCIBusId(cls, number):
            return "00:0a.0" if cls.shared else f"{threading.get_ident()}"

    @staticmethod
    def get_current_stream():
        return types.SimpleNamespace(ptr=99)


@pytest.fixture
def ranks(monkeypatch):
    """Run a function on ranks, each with its communicator; return what they return."""
    makers = threading.local()
    monkeypatch.setattr(
        module, "_requirements", lambda: (makers.library, types.SimpleNamespace(cuda=Gpu))
    )

    def run(function, size=SIZE):
        local, world = LocalWorld(size), World(size)
        results = [None] * size

        def rank(r):
            makers.library = StandIn(world, r, lambda: 99)
            try:
                comm = NcclCommunicator(local.communicators[r], timeout=0.2)
            except TransportUnavailable as error:
                results[r] = error
                return
            try:
                results[r] = function(comm)
            except Exception as error:
                results[r] = error
            comm.close()

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    return run


def test_sums_and_maxima(ranks):
    def work(comm):
        a, b = device([comm.rank, 1, 2]), device([comm.rank, -comm.rank], np.int64)
        comm.allreduce(a)
        comm.allreduce(b, ReduceOp.MAX)
        flags = device([comm.rank == 1, False], bool)
        comm.allreduce(flags)
        comm.synchronize()
        return a.tolist(), b.tolist(), flags.tolist()

    assert ranks(work) == [([3, 3, 6], [2, 0], [True, False])] * 3


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 0, 3]])
def test_pieces_of_sums(counts, ranks):
    total = sum(counts)

    def work(comm):
        send, mine = device(np.arange(total) + comm.rank), device(np.zeros(counts[comm.rank]))
        comm.reduce_scatter(send, mine, counts)
        return mine.tolist()

    expected = np.split(3 * np.arange(total) + 3, np.cumsum(counts)[:-1])
    assert ranks(work) == [piece.tolist() for piece in expected]


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 0, 3]])
def test_gathering(counts, ranks):
    def work(comm):
        out = device(np.zeros(sum(counts)), np.uint16)
        comm.allgather(device([comm.rank] * counts[comm.rank], np.uint16), out, counts)
        return out.tolist()

    assert ranks(work) == [np.repeat([0, 1, 2], counts).tolist()] * 3


def test_exchanging_and_broadcasting(ranks):
    def work(comm):
        send = device([10 * comm.rank + r for r in range(3) for _ in range(r)])
        out = device(np.zeros(3 * comm.rank))
        comm.alltoall(send, out, [0, 1, 2], [comm.rank] * 3)
        root = device([comm.rank] * 2)
        comm.broadcast(root, 2)
        return out.tolist(), root.tolist()

    expected = [[10 * s + r for s in range(3) for _ in range(r)] for r in range(3)]
    assert ranks(work) == [(piece, [2, 2]) for piece in expected]


def test_process_sets_have_communicators_of_their_own(ranks):
    def work(comm):
        ends = comm.subset([0, 2])
        alone = comm.subset([1])
        inner = None if ends is None else ends.subset([0, 1])
        a = device([comm.rank, 1])
        (alone if ends is None else ends).allreduce(a)
        if inner is not None:
            whole = device(np.zeros(3))
            inner.allgather(device([comm.rank] * (1 + inner.rank)), whole, [1, 2])
            assert whole.tolist() == [0, 2, 2]
            assert inner.origin == (0, 2)
        comm.allreduce(a)
        return a.tolist(), len(comm._library.joined)

    # 0 + 2 on the ends, 1 in the middle; then all three.
    assert ranks(work) == [([5, 5], 3), ([5, 5], 1), ([5, 5], 3)]


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aabbcc"])
def test_two_levels_are_three_operations_of_sub_communicators(hosts, ranks):
    n, size = LEVELS_FROM // 4 + 3, len(hosts)

    def work(comm):
        two = HierarchicalCommunicator(comm, Topology.from_hosts(comm.rank, hosts))
        comm._library.seen.clear()
        a = device((np.arange(n) + 7 * comm.rank) % 100)
        two.allreduce(a)
        seen = [name for name in comm._library.seen if not name.startswith("Group")]
        small = device([comm.rank], np.int64)
        two.allreduce(small, ReduceOp.MAX)
        return a.tolist(), seen, small.tolist()

    total = sum((np.arange(n) + 7 * rank) % 100 for rank in range(size))
    # One element is left over, which the whole communicator adds.
    calls = ["ReduceScatter", "AllReduce", "AllGather", "AllReduce"]
    assert ranks(work, size) == [(total.tolist(), calls, [size - 1])] * size


def test_arrays_of_the_host_go_over_the_host(ranks):
    def work(comm):
        a = np.ones(4, np.float32)
        comm.allreduce(a)
        comm.barrier()
        said = comm.allgather_bytes(b"%d" % comm.rank)
        return a.tolist(), said, "AllReduce" in comm._library.seen

    assert ranks(work) == [([3.0] * 4, [b"0", b"1", b"2"], False)] * 3


def test_arguments_that_nccl_cannot_take(ranks):
    def work(comm):
        with pytest.raises(TypeError, match="int16"):
            comm.allreduce(device([1], np.int16))
        with pytest.raises(TypeError, match="both on the GPU"):
            comm.allgather(np.ones(1, np.float32), device([0, 0, 0]))

    assert ranks(work) == [None] * 3


@pytest.mark.parametrize(("code", "kind"), [(REMOTE_ERROR, PeerLost), (1, RingError)])
def test_failures_have_types_and_end_what_is_under_way(code, kind, ranks):
    def work(comm):
        comm._library.states = [IN_PROGRESS, code]
        library = comm._library
        library.run = lambda: IN_PROGRESS
        with pytest.raises(kind, match=f"AllReduce failed on rank {comm.rank}: code {code}"):
            comm.allreduce(device([1]))
        with pytest.raises(kind):
            comm.allreduce(device([1]))
        return library.aborted

    assert ranks(work) == [1] * 3


def test_what_never_ends_is_ended(ranks):
    def work(comm):
        comm._library.run = lambda: IN_PROGRESS
        comm._library.state = lambda handle: IN_PROGRESS
        with pytest.raises(PeerLost, match="did not end within"):
            comm.allreduce(device([1]))
        return comm._library.aborted

    assert ranks(work) == [1] * 3


@pytest.mark.parametrize(("state", "end"), [(0, "CommDestroy"), (IN_PROGRESS, "CommAbort")])
def test_what_does_not_settle_is_not_waited_for_at_the_end(state, end, ranks):
    """To destroy it would wait for its kernels."""
    libraries = []

    def work(comm):
        library, call = comm._library, comm._library.call

        def finalized(name, *arguments):
            found = call(name, *arguments)
            return IN_PROGRESS if name == "CommFinalize" else found

        library.call, library.state = finalized, lambda handle: state
        libraries.append(library)

    ranks(work)
    assert [library.seen[-1] for library in libraries] == [end] * 3


def test_ranks_that_share_a_gpu_are_named_on_all_of_them(ranks, monkeypatch):
    monkeypatch.setattr(Gpu.runtime, "shared", True)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    why = "'nccl' is not available: ranks 0 and 1 share a GPU of host .* Start no more ranks"
    found = ranks(lambda comm: comm.rank)
    assert all(isinstance(error, TransportUnavailable) for error in found)
    assert all(re.search(why, str(error)) for error in found)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert ranks(lambda comm: comm.rank) == [0, 1, 2]


def test_a_gpu_that_failed_is_told_of_at_once_and_by_its_name(ranks, monkeypatch):
    monkeypatch.setattr(Gpu.runtime, "state", 700)  # an illegal address, which stays

    def work(comm):
        comm._timeout = 1000
        for _ in range(2):
            with pytest.raises(RingError, match=f"GPU 0 of rank {comm.rank} failed: 700"):
                comm.synchronize()
        return comm._library.aborted

    assert ranks(work) == [1] * 3


def test_a_lost_rank_ends_what_waits(ranks):
    def work(comm):
        comm._library.run = lambda: IN_PROGRESS
        comm._library.state = lambda handle: IN_PROGRESS
        comm._timeout = 20
        ending = threading.Timer(0.2, interrupter(comm))  # all that waits in this process
        ending.start()
        with pytest.raises(PeerLost, match="another rank was lost"):
            comm.allreduce(device([1]))
        ending.join()
        with pytest.raises(PeerLost, match="another rank was lost"):
            comm.synchronize()
        return comm._library.aborted

    assert ranks(work) == [1] * 3


def test_who_is_told_of_a_lost_rank_finds_ended_what_waited(ranks):
    def work(comm):
        comm._library.run = comm._library.state = lambda *args: IN_PROGRESS
        comm._timeout = 20
        told, early, lock = threading.Event(), [], comm._lock
        ending = threading.Timer(0.1, comm.interrupt)

        class Late:
            """A lock that the thread which ends it gets as late as the other one allows."""

            def __enter__(self):
                if threading.current_thread() is ending:
                    early.append(told.wait(0.3))
                lock.acquire()

            def __exit__(self, *args):
                lock.release()

        comm._lock = Late()
        ending.start()
        with pytest.raises(PeerLost, match="another rank was lost"):
            comm.allreduce(device([1]))
        told.set()
        ending.join()
        return early

    assert ranks(work) == [[False]] * SIZE


def test_ranks_take_the_gpus_in_turn(monkeypatch):
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 2)
    gpus = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(__import__("sys").modules, "cupy", gpus)
    host = LocalWorld(1).communicators[0]
    for local, device_ in (0, 0), (1, 1), (2, 0), (None, 0):
        assert gpu_of(Launched("ringlet", 0, 4, "nccl", local), host) == device_


@pytest.mark.parametrize(("context", "left"), [(0, 3), (7, 1)])
def test_a_thread_that_has_used_no_gpu_makes_no_context_on_the_first(context, left):
    now = [1]
    runtime = types.SimpleNamespace(getDevice=lambda: now[-1], setDevice=now.append)
    driver = types.SimpleNamespace(ctxGetCurrent=lambda: context)
    cuda = types.SimpleNamespace(runtime=runtime, driver=driver)
    with on_device(cuda, 3):
        assert now[-1] == 3
        with on_device(cuda, 3):
            pass
    assert now[-1] == left
    assert now.count(1) == (1 if context == 0 else 2)
