"""Members that are noted one by one, and submitted together once a bucket has all of its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import DuplicateName, Engine, Limits, Request
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

SIZES = (3, 70, 40, 1200)


def with_group(body, sizes=SIZES, ranks=2, **limits):
    """Run ``body(group, rank)`` on ranks that have declared tensors of ``sizes``."""

    def rank_main(comm):
        engine = Engine(comm, open_control, Limits(**limits))
        try:
            asked = [Request(f"w{i}", shape=(n,)) for i, n in enumerate(sizes)]
            given = [parse("none")] * len(asked), [{} for _ in asked]
            return body(engine.declare("g", asked, *given), comm.rank)
        finally:
            engine.shutdown()

    return run_local(rank_main, ranks)


def values(rank, sizes=SIZES):
    rng = np.random.default_rng(rank)
    return {f"w{i}": rng.standard_normal(n).astype(np.float32) for i, n in enumerate(sizes)}


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(len(SIZES))), threshold=st.sampled_from([100, 400, 1 << 20]))
def test_results_are_those_of_members_submitted_one_by_one(order, threshold):
    names = [f"w{i}" for i in order]

    def singly(group, rank):
        given = values(rank)
        for name in names:
            group.submit(name, given[name])
        group.wait(60)
        return [given[name].tobytes() for name in names]

    def together(group, rank):
        given = values(rank)
        for name in names:
            due = group.note(name)
            group.submit_all([(each, given[each], None) for each in due])
        assert not group.due()
        assert not group.missing()
        group.wait(60)
        return [given[name].tobytes() for name in names]

    limits = {"fusion_threshold": threshold}
    assert with_group(singly, **limits) == with_group(together, **limits)


def test_a_bucket_that_is_whole_makes_all_that_was_noted_due():
    def body(group, rank):
        last = [m.request.name for m in group.buckets[0].members]
        others = [name for name in group.members if name not in last]
        given = values(rank)
        found = []
        for _ in range(2):  # a step leaves nothing behind
            steps = [group.note(name) for name in [others[0], *last]]
            found.append((steps[:-1], sorted(steps[-1])))
            assert group.in_step
            assert not group.due()
            group.submit_all([(name, given[name], None) for name in group.members])
            group.wait(60)
            assert not group.in_step
        return found, sorted([others[0], *last])

    for found, expected in with_group(body, fusion_threshold=400):
        assert found == [([[]] * (len(expected) - 1), expected)] * 2


def test_what_was_noted_counts_as_begun_until_the_step_is_given_up():
    def body(group, rank):
        group.note("w0")
        assert group.in_step
        with pytest.raises(RuntimeError, match="in mid-step"):
            group.restart(3)
        if rank == 0:
            group.abandon("tried out")
        else:
            with pytest.raises(Exception, match="tried out"):
                group.wait(60)
        assert not group.in_step
        assert not group.due()

    with_group(body)


def test_a_bucket_goes_though_a_member_behind_it_is_refused():
    def body(group, rank):
        given = values(rank)
        first = [m.request.name for m in group.buckets[0].members]
        wrong = next(name for name in group.members if name not in first)
        tensors = [(name, given[name], None) for name in first]
        with pytest.raises(ValueError, match=f"'{wrong}' has 1 elements"):
            group.submit_all([*tensors, (wrong, np.zeros(1, np.float32), None)])
        with pytest.raises(DuplicateName, match=repr(first[0])):
            group.submit_all(tensors)
        group.submit_all([(name, given[name], None) for name in group.missing()])
        group.wait(60)
        return [array.tobytes() for array in given.values()]

    found = with_group(body, fusion_threshold=400)
    assert found[0] == found[1]
