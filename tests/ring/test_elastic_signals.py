"""Signals to the launcher of an elastic job: ranks may take their time, and their ends count."""

from __future__ import annotations

import signal
import time
from unittest.mock import Mock

import pytest
from begun_members import driver_of
from launched_jobs import needs_torch

from ringlet.ring.elastic import driver as module
from ringlet.ring.launch.rank_table import Rank
from ringlet.ring.wire.launch_link import Kind


class Job:
    """The launcher of two ranks that have begun, without processes, and its ``now``."""

    def __init__(self):
        self.now = time.monotonic()
        self.printer = Mock(pending=0)
        self.ranks = [Rank(n, "a", channel=Mock(closed=False)) for n in range(2)]
        self.driver = driver_of(self.ranks, self.printer)

    def end(self, number, code):
        self.ranks[number].code, self.ranks[number].done = code, True
        self.turn()

    def turn(self, later=0.0):
        now = self.now + later
        self.driver._look_at_members(now)
        if self.driver._over is None:
            self.driver._decide(now)
        else:
            self.driver._end_members(now)

    def told(self, number):
        """Return the signals that were passed on to a rank."""
        sent = [call.args for call in self.ranks[number].channel.send.call_args_list]
        return [int(args[1]) for args in sent if args[0] is Kind.SIGNAL]

    def said(self):
        return [call.args[0] for call in self.printer.note.call_args_list]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_ranks_that_save_are_not_killed_and_their_codes_count(number):
    """They were killed after five seconds, and the job never ended with 0."""
    job = Job()
    job.driver._forward(number)
    job.turn(later=1000.0)
    job.end(0, 0)
    job.turn(later=2000.0)
    assert job.told(1) == [number]
    assert job.driver._over is None
    job.end(1, 0)
    assert job.driver._over == (0, "")


def test_the_second_interrupt_kills_after_another_signal():
    job = Job()
    for number in (signal.SIGTERM, signal.SIGINT):
        job.driver._forward(number)
    job.turn(later=1000.0)
    assert job.told(0) == job.told(1) == [signal.SIGTERM, signal.SIGINT]
    job.driver._forward(signal.SIGINT)
    job.now = time.monotonic()
    job.turn()
    assert job.told(0)[2:] == job.told(1)[2:] == [signal.SIGKILL]
    assert job.driver._over[0] == 128 + signal.SIGINT
    assert job.said()[-1] == "killing every rank"


def test_a_rank_that_has_not_come_is_not_waited_for():
    job = Job()
    job.ranks[1].channel = None
    job.driver._forward(signal.SIGTERM)
    job.end(0, 0)
    assert job.driver._over == (143, "the job was ended by SIGTERM")


def test_no_rank_is_to_blame_for_the_users_signal():
    job = Job()
    for number in (signal.SIGTERM, signal.SIGINT):
        job.driver._forward(number)
    for number in range(2):
        job.end(number, -signal.SIGINT)
    assert job.driver._over == (130, "the job was ended by SIGINT")
    assert job.driver._blamed is None
    job = Job()
    job.driver._forward(signal.SIGTERM)
    for number in range(2):
        job.end(number, 3)
    assert job.driver._over == (3, "rank 0 on a exited with code 3")
    assert job.driver._blamed == 0


@pytest.mark.parametrize("forwarded", [[], [signal.SIGTERM], [signal.SIGINT]])
def test_who_is_killed_when_a_failure_has_ended_the_job_is_named(monkeypatch, forwarded):
    job = Job()
    job.driver._finish(7, "rank 0 failed", job.now)
    for number in forwarded:
        job.driver._forward(number)  # too late to give more time
    job.end(0, 7)
    job.turn(later=module.GRACE - 1)
    assert signal.SIGKILL not in job.told(1)
    for _ in range(2):
        job.turn(later=module.GRACE)
    assert job.told(1)[-1] == signal.SIGKILL
    assert job.said()[-1] == "killing what has not ended within 5 s: rank 1 on a"
    assert sum("killing" in text for text in job.said()) == 1
    assert job.driver._over[0] == 7


SAVES = """
import os, signal, sys
signal.signal({number}, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))
os.write(1, b'ready\\n')
while True: signal.pause()
"""


@needs_torch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_whose_ranks_all_save_ends_well(ringlet, number):
    running = ringlet(SAVES.format(number=int(number)), 2, "gloo", "--min-np", "2")
    running.until(b"ready\n", 2)
    running.process.send_signal(number)
    returned, out, err = running.end()
    assert returned == 0
    assert out.count(b"saved") == 2
    assert f"{number.name} passed on to every rank".encode() in err
