"""Time in which this process stood still does not count: others who stood still have theirs."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from begun_members import driver_of

from ringlet.ring import awake_clock
from ringlet.ring.awake_clock import LOOK, SLACK, AwakeClock
from ringlet.ring.elastic.driver import GRACE, _Attended
from ringlet.ring.elastic.membership import FENCE, LEAVE
from ringlet.ring.launch import rank_table
from ringlet.ring.launch.rank_table import Rank
from ringlet.ring.wire.launch_link import Kind

STALL = 100.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is by the clock that stalls do not stop."""
    now = [1000.0]
    monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_time_counts_while_the_clock_is_looked_at(now: list[float]) -> None:
    clock = AwakeClock()
    began = clock.now()
    for _ in range(100):
        now[0] += SLACK
        clock.now()
    assert clock.now() - began == pytest.approx(100 * SLACK)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 5.0])
def test_of_a_look_that_comes_late_no_more_counts_than_was_to_pass(
    now: list[float], seconds: float
) -> None:
    clock = AwakeClock()
    began = clock.now()
    for turns in range(1, 4):
        clock.sleep(seconds)
        now[0] += seconds + STALL
        assert clock.now() - began == pytest.approx(turns * (seconds + SLACK))


def test_all_time_counts_where_nobody_knows_when_the_next_look_comes(now: list[float]) -> None:
    clock = AwakeClock()
    began = clock.now()
    clock.sleep(None)
    now[0] += STALL
    assert clock.now() - began == STALL


def test_who_waits_for_a_time_looks_at_the_clock_meanwhile(now: list[float]) -> None:
    clock = AwakeClock()
    at = clock.now() + 1.5 * LOOK
    assert clock.left(at) == pytest.approx(LOOK)
    now[0] += LOOK
    clock.sleep(0.0)
    assert clock.left(at) < LOOK
    assert clock.left(at - STALL) == 0.0


class Stalling:
    """The launcher of an elastic job of two ranks, which stands still while it waits."""

    def __init__(self, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.stall = now, 0.0
        waits = self

        class Poll:
            def register(self, *_: int) -> None:
                """Wait for nothing but time."""

            def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
                assert milliseconds is not None
                now[0] += max(0.001, milliseconds / 1000) + waits.stall
                waits.stall = 0.0
                return []

        poll = SimpleNamespace(poll=Poll, POLLIN=1, POLLOUT=4)
        monkeypatch.setattr(rank_table, "select", poll)
        self.ranks = [Rank(n, "a", channel=Mock(closed=False, pending=0)) for n in range(2)]
        self.driver = driver = driver_of(self.ranks, Mock(pending=0, wants=None))
        driver._signals = driver._noise = Mock()
        driver._listener = Mock(patience=lambda: None, sources=list)
        driver._discovery.look(0.0)

    def turn(self, stall: float = 0.0) -> None:
        """Wait, and do what is due then."""
        self.stall = stall
        self.driver._wait()
        now = self.driver._clock.now()
        if self.driver._over is None:
            self.driver._decide(now)
        else:
            self.driver._end_members(now)

    def killed_after(self, stalls: int) -> float:
        """Return how many seconds pass until rank 1 is killed, besides so many stalls."""
        began = self.now[0]
        for turn in range(1000):
            self.turn(stall=STALL if turn < stalls else 0.0)
            if (Kind.SIGNAL, b"9") in [c.args for c in self.ranks[1].channel.send.call_args_list]:
                return self.now[0] - began - stalls * STALL
        raise AssertionError("it was never killed")


@pytest.mark.parametrize("stalls", [0, 1, 3])
@pytest.mark.parametrize("leaving", [False, True])
def test_a_lost_member_has_its_time_where_the_launcher_stood_still(
    now: list[float], monkeypatch: pytest.MonkeyPatch, stalls: int, leaving: bool
) -> None:
    """It was killed as soon as both went on, while it saved what it had to."""
    job = Stalling(now, monkeypatch)
    members = job.driver._membership
    if leaving:
        members.leaves(1, 3, job.driver._clock.now())
    members.asks(0, (1,), job.driver._clock.now())
    seconds = LEAVE if leaving else FENCE
    assert job.killed_after(stalls) == pytest.approx(seconds, abs=stalls * SLACK + 0.01)


@pytest.mark.parametrize("stalls", [0, 1, 3])
def test_a_job_that_is_over_leaves_its_ranks_their_time_where_the_launcher_stood_still(
    now: list[float], monkeypatch: pytest.MonkeyPatch, stalls: int
) -> None:
    job = Stalling(now, monkeypatch)
    job.driver._finish(1, "no rank is left", job.driver._clock.now())
    assert job.killed_after(stalls) == pytest.approx(GRACE, abs=stalls * SLACK + 0.05)


def test_a_member_may_take_its_time_to_start_where_the_launcher_stood_still(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Stalling(now, monkeypatch)
    started = Mock(poll=lambda: None)
    job.driver._attended[1] = _Attended(started, start_by=job.driver._clock.now() + 30.0)
    job.stall = STALL
    job.driver._wait()
    job.driver._look_at_members(job.driver._clock.now())
    assert not started.end.called
