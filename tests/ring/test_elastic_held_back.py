"""What the launcher says of residuals of ranks that are gone."""

from __future__ import annotations

import pytest

from ringlet.ring.elastic.held_back import HeldBack
from ringlet.ring.rendezvous import epochs
from ringlet.ring.wire.kv_store import KvStore

LOST = "what compression held back on rank"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, []),
        (b"[0.0, false]", []),
        (b"[2.5, false]", [f"{LOST} 3 is lost: gradients of norm 2.5, at its last commit"]),
        (b"[2.5, true]", []),  # those that are left will say
        (b"[NaN, false]", []),
        (b"[1]", []),
        (b"[[], true]", []),
        (b"rubbish", []),
    ],
)
def test_what_is_lost_with_a_rank_is_counted(told, said):
    store = KvStore()
    held_back = HeldBack(store)
    if told is not None:
        store.leave(epochs.held_name(5), told)
    held_back.gone(5, 3, 1)
    assert list(held_back.notes(failed=False)) == said
    assert list(held_back.notes(failed=False)) == []


def test_who_is_sent_away_and_then_fails_is_counted_once():
    store = KvStore()
    held_back = HeldBack(store)
    store.leave(epochs.held_name(5), b"[2.5, false]")
    held_back.gone(5, 3, 1)
    assert len(list(held_back.notes(failed=False))) == 1
    held_back.gone(5, 3, 1)
    assert list(held_back.notes(failed=False)) == []


def test_who_leaves_after_the_others_have_settled_is_lost_unless_somebody_has_taken_it_over():
    store = KvStore()
    held_back = HeldBack(store)
    for member in (5, 6):
        store.leave(epochs.held_name(member), b"[2.5, true]")
    store.leave(epochs.TAKEN, b"[2, [[5, 3, 2.5, 0, 1]]]")
    assert list(held_back.notes(failed=False)) == [
        f"{LOST} 3 of before goes on with rank 1 of now: gradients of norm 2.5"
    ]
    held_back.gone(5, 3, 1)
    held_back.gone(6, 4, 1)
    assert list(held_back.notes(failed=False)) == [
        f"{LOST} 4 is lost: gradients of norm 2.5, at its last commit"
    ]


def test_nothing_is_said_of_ranks_that_end_as_the_job_has_failed():
    store = KvStore()
    held_back = HeldBack(store)
    store.leave(epochs.held_name(5), b"[2.5, false]")
    held_back.gone(5, 3, 1)
    assert list(held_back.notes(failed=True)) == []


def test_what_is_taken_over_is_told_once_and_the_rest_is_lost():
    store = KvStore()
    held_back = HeldBack(store)
    for member, rank, norm, epoch in ((5, 3, 2.5, 1), (6, 0, 1.5, 1), (7, 1, 0.5, 2)):
        store.leave(epochs.held_name(member), b"[%g, true]" % norm)
        held_back.gone(member, rank, epoch)

    def hear(told):
        store.leave(epochs.TAKEN, told)
        return list(held_back.notes(failed=False))

    assert hear(b"[2, [[5, 3, 2.5, 0, 1], [9, 4, 1.25, 7, 0]]]") == [
        f"{LOST} 3 of before goes on with rank 1 of now: gradients of norm 2.5",
        f"{LOST} 4 of before goes on with rank 0 of now: gradients of norm 1.25, 7 steps old",
        f"{LOST} 0 is lost: gradients of norm 1.5, at its last commit",
    ]
    assert hear(b"[2, [[7, 1, 0.5, -2, 0]]]") == []  # of the same epoch
    for rubbish in (
        b"",
        b"rubbish",
        b"[3]",
        b"[3, [[7]]]",
        b'[3, [["x", 1, 1, 1, 1]]]',
        b"[[], 0]",
    ):
        assert hear(rubbish) == []
    assert hear(b"[3, [[5, 3, 2.5, 0, 1], [7, 1, 0.5, -2, 0]]]") == [
        f"{LOST} 1 of before goes on with rank 0 of now: gradients of norm 0.5, 2 steps ahead"
    ]
    assert hear(b"[4, []]") == []  # nobody is missing
