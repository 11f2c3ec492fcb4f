"""Who counts as frozen while others wait, or when they have ended, and who does not."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from ringlet.ring.elastic.signs_of_life import SignsOfLife
from ringlet.ring.launch.rank_table import Rank, RankTable
from ringlet.ring.launch.unanswered import Unanswered
from ringlet.ring.processes.output import HIGH
from ringlet.ring.wire.launch_link import Kind

SILENCE = 5.0


@pytest.mark.parametrize("listens", [True, False])
def test_nobody_is_silent_while_the_launcher_does_not_listen(listens: bool) -> None:
    """As nobody reads what it prints: then it takes no more from the ranks."""
    late = SimpleNamespace(number=0, here=True, done=False, heard=0.0, host="a", channel=Mock())
    member = SimpleNamespace(rank=0)
    membership = Mock(members=[member], late=lambda: [0], called=list)
    signs = SignsOfLife(membership, SimpleNamespace(ranks=[late]), SILENCE)
    assert list(signs.look(1.0, listens=True)) == []
    late.channel.send.assert_called_once()
    notes = list(signs.look(2.0 + SILENCE, listens))
    assert membership.silent.called == bool(notes) == listens
    if listens:
        return
    assert signs.patience(2.0 + SILENCE) == SILENCE
    late.heard = 3.0 + SILENCE
    assert list(signs.look(3.0 + 2 * SILENCE, listens=True)) == []
    assert not membership.silent.called


def left_behind(code: int | None = 0, silence: float = SILENCE) -> tuple[Rank, Mock, Unanswered]:
    """Return a rank that is left when another one has ended with ``code``, and who asks after it.

    The one in the middle is what the launcher prints with.
    """
    ended, left = Rank(0, "a", channel=Mock(), code=code), Rank(1, "a", channel=Mock())
    printer = Mock(pending=0)
    table = RankTable([ended, left], printer, lambda _: {})
    return left, printer, Unanswered(table, printer, silence)


def questions(rank: Rank) -> int:
    assert isinstance(rank.channel, Mock)
    calls = rank.channel.send.call_args_list
    assert [call.args for call in calls] == [(Kind.ALIVE,)] * len(calls)
    return len(calls)


def test_who_does_not_answer_when_others_have_ended_is_named_once() -> None:
    left, printer, unanswered = left_behind()
    unanswered.look(10.0)
    assert unanswered.patience(10.0) == SILENCE
    unanswered.look(14.9)
    assert not printer.note.called
    for later in (15.0, 30.0, 60.0):
        unanswered.look(later)
    assert questions(left) == 1
    assert unanswered.patience(60.0) is None
    (said,) = (call.args[0] for call in printer.note.call_args_list)
    assert said.startswith("rank 1 on a has given no sign of life for 5 s, while other ranks have")


def test_who_answers_may_go_on_for_long() -> None:
    left, printer, unanswered = left_behind()
    now = 10.0
    for asked in range(1, 30):
        unanswered.look(now)
        assert questions(left) == asked
        left.heard = now + 0.5
        now += unanswered.patience(now) or 0.0
    assert not printer.note.called
    for called in (False, True):  # it is stopped from now on
        unanswered.look(now)
        assert printer.note.called == called
        now += unanswered.patience(now) or 0.0
    assert now == 10.0 + 29 * (0.5 + SILENCE / 2) + SILENCE


def test_who_cannot_be_heard_as_nobody_reads_the_output_is_not_named() -> None:
    _, printer, unanswered = left_behind()
    unanswered.look(10.0)
    printer.pending = HIGH
    unanswered.look(100.0)
    printer.pending = 0
    unanswered.look(101.0)
    assert not printer.note.called
    assert unanswered.patience(101.0) == SILENCE - 1


@pytest.mark.parametrize(("code", "silence"), [(None, SILENCE), (1, SILENCE), (0, 0.0)])
def test_nobody_is_asked_while_all_run_nor_when_one_has_failed(
    code: int | None, silence: float
) -> None:
    left, _, unanswered = left_behind(code, silence)
    unanswered.look(10.0)
    assert questions(left) == 0
    assert unanswered.patience(10.0) is None
