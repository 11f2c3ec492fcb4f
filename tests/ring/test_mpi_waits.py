"""How ranks wait for what MPI does: at rest, and to the end."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest

from ringlet.ring.transports import mpi_waits
from ringlet.ring.transports.mpi_waits import wait_at_rest


class Pending:
    """What MPI calls a request; complete after so many ``looks``."""

    def __init__(self, looks: int, error: BaseException | None = None) -> None:
        self.looks, self.error, self.waited = looks, error, False

    def Test(self) -> bool:
        self.looks -= 1
        if self.looks == 0 and self.error is not None:
            raise self.error
        return self.looks <= 0

    def Wait(self) -> None:
        self.waited = True


LOOKED = 5e-5  # seconds that a row of looks takes


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return when there were rests, and how long, by a clock that these alone, and looks, move."""
    now, taken = [0.0], list[tuple[float, float]]()

    def sleep(seconds: float) -> None:
        taken.append((now[0], seconds))
        now[0] += seconds

    def clock() -> float:
        now[0] += LOOKED
        return now[0]

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", clock)
    return taken


def test_what_is_soon_complete_costs_no_rest(
    rests: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = list[None]()
    monkeypatch.setattr(os, "sched_yield", lambda: offered.append(None))
    pending = Pending(2 * mpi_waits._LOOKS)
    wait_at_rest(pending)
    assert (rests, len(offered), pending.waited) == ([], 1, False)


def test_rests_are_a_part_of_the_wait_so_that_it_ends_little_later(
    rests: list[tuple[float, float]],
) -> None:
    wait_at_rest(Pending(1000 * mpi_waits._LOOKS))
    for begun, seconds in rests:
        assert seconds <= (begun - LOOKED) / mpi_waits._SHARE
    for (begun, seconds), (then, _) in pairwise(rests):  # and it is awake in between
        assert then - (begun + seconds) >= seconds / mpi_waits._AWAKE
    assert len(rests) > 50
    assert rests[-1][1] == mpi_waits._LONGEST > rests[0][1]  # who waits long costs little


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("MPI")])
def test_memory_is_mpis_until_the_end(error: BaseException) -> None:
    """Who is interrupted, or told of an error, may give it back: to whom else comes after."""
    pending = Pending(3, error)
    with pytest.raises(type(error)):
        wait_at_rest(pending)
    assert pending.waited
