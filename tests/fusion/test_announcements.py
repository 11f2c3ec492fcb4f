"""Why a collective failed: the coordinator's word comes first, whatever shows first on a rank."""

import time

import pytest

from ringlet.fusion import EngineClosed, background_loop
from ringlet.fusion.background_loop import Announcements
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.requests.request import dumps, loads
from ringlet.ring import PeerLost
from ringlet.ring.control.plane import ControlPlane


class Scripted(ControlPlane):
    """Gives out ``heard``, one list a call; then rank 0 is gone, if it is said to be."""

    def __init__(self, *heard, gone=None, answer=()):
        self.heard, self.gone, self.answer = list(heard), gone, list(answer)
        self.sent = []

    def send(self, message):
        self.sent.append(message)
        self.heard.append(self.answer)

    def receive(self, timeout=None):
        if self.heard:
            return self.heard.pop(0)
        if self.gone:
            raise PeerLost(self.gone, [0])
        return []

    def wake(self):
        pass

    def close(self):
        pass


LOST = m.LOST + dumps([[2], "rank 2 is gone: it was killed"])
GONE = "rank 0, the coordinator, is gone: its connection closed without a goodbye"


@pytest.mark.parametrize(
    "error", [PeerLost(GONE, [0]), PeerLost("gloo allreduce failed", severed=[2])]
)
@pytest.mark.parametrize("gone", [None, GONE])
def test_what_the_coordinator_has_said_comes_before_what_shows_here(error, gone):
    """Such as when rank 0 leaves because rank 2 was lost, and a vote finds nobody there."""
    control = Scripted([m.STALLED + dumps("")], [LOST], gone=gone)
    cause = Announcements(control).cause_of(error)
    assert isinstance(cause, PeerLost)
    assert (str(cause), cause.ranks) == ("rank 2 is gone: it was killed", (2,))
    assert control.sent == []


def test_an_engine_that_broke_is_a_cause_as_well():
    control = Scripted([m.BROKEN + dumps("rank 1: KeyError: 'x'")])
    cause = Announcements(control).cause_of(PeerLost("gloo allreduce failed"))
    assert isinstance(cause, EngineClosed)
    assert str(cause) == "the engine broke on rank 1: KeyError: 'x'"


@pytest.mark.parametrize("why", ["ValueError: no data", ""])
def test_why_rank_0_has_left_is_told_to_those_who_need_it_later(why):
    told = Coordinator(2).on_message(0, m.GOODBYE + dumps(why))
    announcements = Announcements(Scripted(told, gone="rank 0 closed the control plane"))
    announcements.listen(None)
    with pytest.raises(PeerLost) as caught:
        announcements.listen(None)
    said = f"has ended ({why})" if why else "has shut down"
    assert (str(caught.value), caught.value.ranks) == (f"rank 0 {said}", (0,))


def test_the_end_of_another_rank_is_not_rank_0s():
    told = Coordinator(2).on_message(1, m.GOODBYE + dumps("KeyError: 1"))
    announcements = Announcements(Scripted(told, gone=GONE))
    announcements.listen(None)
    with pytest.raises(PeerLost, match="without a goodbye"):
        announcements.listen(None)


def test_a_connection_that_broke_is_told_to_the_coordinator_which_tells_all(monkeypatch):
    monkeypatch.setattr(background_loop, "_ENDING_S", 0.01)
    coordinator = Coordinator(4)
    told = []
    for rank, other in ((3, 1), (1, 3)):  # both report it, and the first report is everybody's
        control = Scripted()
        Announcements(control).cause_of(PeerLost(f"gloo failed on rank {rank}", severed=[other]))
        (message,) = control.sent
        told += coordinator.on_message(rank, message)
    ranks, text = loads(told[0][1:])
    assert ranks == [1, 3]
    assert text == (
        "the connection between rank 1 and rank 3 broke, though they are there: "
        "gloo failed on rank 3"
    )
    control = Scripted(answer=told)
    cause = Announcements(control).cause_of(PeerLost("gloo failed on rank 1", severed=[3]))
    assert (str(cause), cause.ranks) == (text, (1, 3))


class Standing(Scripted):
    """Stands still, with this rank, for a minute when it is first asked, and again once told."""

    def __init__(self, monkeypatch, *heard):
        super().__init__(*heard)
        self.now, self.stalls = 100.0, True
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def send(self, message):
        super().send(message)
        self.heard = [[], [], [LOST]]
        self.stalls = True

    def receive(self, timeout=None):
        self.now += min(timeout, 0.1) + 60.0 * self.stalls
        self.stalls = False
        return super().receive(timeout)


@pytest.mark.parametrize("told_at_once", [True, False])
def test_the_coordinators_word_is_waited_for_as_long_where_this_rank_stood_still(
    monkeypatch, told_at_once
):
    """So did rank 0: this rank told another cause than all others."""
    heard = ([], [], [LOST]) if told_at_once else ([] for _ in range(20))
    control = Standing(monkeypatch, *heard)
    cause = Announcements(control).cause_of(PeerLost("gloo failed", severed=[2]))
    assert (str(cause), len(control.sent)) == ("rank 2 is gone: it was killed", not told_at_once)


def test_without_a_word_the_error_itself_is_the_cause(monkeypatch):
    monkeypatch.setattr(background_loop, "_ENDING_S", 0.01)
    monkeypatch.setattr(background_loop, "_NAMING_S", 0.01)
    error = PeerLost("gloo allreduce failed on rank 1")
    assert Announcements(Scripted()).cause_of(error) is error
    gone = Announcements(Scripted(gone=GONE)).cause_of(error)
    assert (str(gone), gone.ranks) == (GONE, (0,))
