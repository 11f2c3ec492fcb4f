"""Ranks as threads: every collective against an oracle, disagreements and failures."""

import runpy
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import Mismatch, PeerLost, ReduceOp, RingError
from ringlet.ring.dtypes import NAMES
from ringlet.ring.errors import ProtocolError
from ringlet.ring.transports.local import LocalWorld, run_local

WORKER = runpy.run_path(str(Path(__file__).with_name("worker_collectives.py")))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_table_of_cases(size):
    digests = run_local(WORKER["play_all"], size)
    assert all(d == digests[0] for d in digests)


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(1, 5),
    kind=st.sampled_from(["allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast"]),
    dtype=st.sampled_from(NAMES),
    n=st.integers(0, 70) | st.integers(0, 40000),
    op=st.sampled_from(WORKER["OPS"]),
    uneven=st.booleans(),
    special=st.booleans(),
    root=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_any_case_equals_the_oracle(size, kind, dtype, n, op, uneven, special, root, seed):
    case = WORKER["Case"](kind, dtype, n, op, uneven, special, root % size, seed)
    results = run_local(WORKER["play"], size, case)
    assert all(r == results[0] for r in results)


def test_results_come_by_rank_and_arguments_are_passed():
    assert run_local(lambda comm, a, b: (comm.rank, comm.size, a + b), 3, 1, 2) == [
        (0, 3, 3),
        (1, 3, 3),
        (2, 3, 3),
    ]


def test_share_hands_over_the_object_itself():
    thing = object()
    assert all(
        x is thing for x in run_local(lambda c: c.share(thing if c.rank == 1 else None, 1), 3)
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda comm: comm.allreduce(np.zeros(4, np.float32), ReduceOp.MAX),
        lambda comm: comm.allreduce(np.zeros(5, np.float32)),
        lambda comm: comm.allreduce(np.zeros(4, np.float64)),
        lambda comm: comm.allreduce(np.zeros(4, np.uint16), dtype="bfloat16"),
        lambda comm: comm.broadcast(np.zeros(4, np.float32)),
        lambda comm: comm.barrier(),
        lambda comm: comm.allgather(np.zeros(1, np.int8), np.zeros(3, np.int8)),
    ],
)
def test_a_disagreement_is_the_same_error_on_every_rank_and_breaks_nothing(other):
    def run(comm):
        text = None
        try:
            other(comm) if comm.rank == 1 else comm.allreduce(np.zeros(4, np.float32))
        except Mismatch as error:
            text = str(error)
        one = np.ones(1)
        comm.allreduce(one)
        return text, one[0]

    results = run_local(run, 3)
    assert results[0] == results[1] == results[2]
    assert "0, 2 called allreduce(SUM) of 4 float32" in results[0][0]
    assert "1 called " in results[0][0]
    assert results[0][1] == 3


def test_alltoall_counts_that_do_not_fit_are_named():
    def run(comm):
        counts = [2, 2] if comm.rank == 0 else [1, 1]
        total = sum(counts)
        comm.alltoall(np.zeros(total), np.zeros(total), counts, counts)

    with pytest.raises(Mismatch, match="rank 0 sends 2 elements to rank 1, which expects 1"):
        run_local(run, 2)


@pytest.mark.parametrize("n", [4, 1_000_000])
def test_the_first_failure_is_raised_and_the_others_learn_who_failed(n):
    seen = {}

    def run(comm):
        if comm.rank == 1:
            raise KeyError("boom")
        try:
            comm.allreduce(np.zeros(n))
        except PeerLost as error:
            seen[comm.rank] = error
            raise

    with pytest.raises(KeyError, match="boom"):
        run_local(run, 3)
    assert {r: e.ranks for r, e in seen.items()} == {0: (1,), 2: (1,)}
    assert "rank 1 failed with KeyError" in str(seen[0])


def test_a_rank_that_returns_early_is_lost_to_those_who_wait():
    with pytest.raises(PeerLost, match="rank 0 closed") as caught:
        run_local(lambda comm: comm.rank and comm.barrier(), 2)
    assert caught.value.ranks == (0,)


def test_what_is_done_before_a_communicator_closes_may_still_use_it():
    def work(comm):
        comm.before_close = comm.barrier  # as an engine does that has promised a collective
        comm.close()
        with pytest.raises(RingError, match="is closed"):
            comm.barrier()

    run_local(work, 2)


def test_a_rank_that_fails_breaks_the_subsets_it_is_in_and_is_named_by_its_first_rank():
    seen = {}

    def run(comm):
        high = comm.subset([1, 2, 3])
        inner = high.subset([1, 2]) if high is not None else None  # ranks 2 and 3
        low = comm.subset([0, 1])
        if comm.rank == 3:
            raise KeyError("boom")
        if low is not None:
            low.barrier()  # does not contain the lost rank
        try:
            (inner or high or comm).barrier()
        except PeerLost as error:
            seen[comm.rank] = error
            raise

    with pytest.raises(KeyError, match="boom"):
        run_local(run, 4)
    assert {r: e.ranks for r, e in seen.items()} == dict.fromkeys(range(3), (3,))
    assert all("rank 3 failed with KeyError" in str(error) for error in seen.values())


def test_a_member_that_closes_a_subset_is_lost_to_the_subset_only():
    def run(comm):
        subset = comm.subset([1, 2])
        if comm.rank == 1:
            subset.close()
        if comm.rank == 2:
            with pytest.raises(PeerLost, match="rank 1 closed its communicator"):
                subset.barrier()
        comm.barrier()
        comm.close()
        if subset is not None:
            with pytest.raises(RingError, match="closed"):
                subset.barrier()

    run_local(run, 3)


def test_threads_of_the_callers_own():
    world = LocalWorld(2)
    arrays = [np.full(3, r + 1.0) for r in range(2)]
    other = threading.Thread(target=lambda: world.communicators[1].allreduce(arrays[1]))
    other.start()
    world.communicators[0].allreduce(arrays[0])
    other.join()
    np.testing.assert_array_equal(arrays, np.full((2, 3), 3.0))
    world.communicators[0].close()
    world.communicators[0].close()
    with pytest.raises(RingError, match="closed"):
        world.communicators[0].barrier()
    with pytest.raises(PeerLost):
        world.communicators[1].barrier()


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.allreduce(np.zeros((2, 2))),
        lambda c: c.allreduce(np.zeros(8)[::2]),
        lambda c: c.allreduce(np.zeros(4), ReduceOp.AVERAGE),
        lambda c: c.allgather(np.zeros(2), np.zeros(3), [3]),
        lambda c: c.broadcast(np.zeros(2), root=1),
        lambda c: LocalWorld(0),
    ],
)
def test_bad_arguments_are_refused(call):
    with pytest.raises(ValueError, match=r"must be|flat|counts|at least one"):
        run_local(call, 1)


@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_lengths_of_control_data_are_looked_at_before_memory_is_taken(size):
    def tell(comm):
        if comm.rank == 1:
            comm.allgather(np.array([size], np.int64), np.zeros(3, np.int64))
            comm.broadcast(np.array([size], np.int64), 1)
            return ""
        with pytest.raises(ProtocolError) as gathered:
            comm.allgather_bytes(b"x")
        with pytest.raises(ProtocolError) as sent:
            comm.broadcast_bytes(None, 1)
        assert str(sent.value) == str(gathered.value)
        return str(sent.value)

    first, _, third = run_local(tell, 3)
    assert first == third
    assert first.startswith(f"rank 1 announces {size} bytes of control data, and at most ")
