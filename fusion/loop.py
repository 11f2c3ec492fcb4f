"""The engine's thread: it compresses what is complete, votes, asks, and does what is announced."""

from __future__ import annotations

import logging
import time
from collections import deque

from ringlet.fusion import messages as m
from ringlet.fusion.errors import BrokenElsewhere, EngineClosed, LostElsewhere, in_words
from ringlet.fusion.group import Group
from ringlet.fusion.hearing import Hearing
from ringlet.fusion.hooks import Hooks
from ringlet.fusion.inquiries import Inquiries
from ringlet.fusion.lifetime import Lifetime
from ringlet.fusion.participant import Participant
from ringlet.fusion.request import dumps, loads
from ringlet.ring.control import ControlPlane
from ringlet.ring.errors import PeerLost
from ringlet.ring.interrupt import hold

log = logging.getLogger("ringlet")

_LAST_S = 2.0  # for exchanges under way when a rank has left
_SENT_S = 0.3  # for what a rank had sent before it was lost
_LEAVING_S = 10.0  # how long to wait until the coordinator has heard the goodbye


class Loop:
    """What the thread runs until the engine ends. ``check_every`` (seconds) looks for stalls."""

    def __init__(
        self,
        control: ControlPlane,
        participant: Participant,
        inquiries: Inquiries,
        hooks: Hooks,
        life: Lifetime,
        check_every: float | None,
    ) -> None:
        self.released: deque[Group] = deque()  # groups to forget
        self._control, self._participant, self._inquiries = control, participant, inquiries
        self._hooks, self._life = hooks, life
        self._hearing = Hearing(control)
        self._check_every, self._checked = check_every, time.monotonic()
        hold(self)  # the coordinator tells why a collective failed

    def run(self) -> None:
        """Go round until the engine is closed or fails, which all that is in flight is told."""
        try:
            cause = self._serve()
        except BaseException as error:  # whatever it is, somebody waits here, and others elsewhere
            log.debug("the engine failed", exc_info=True)
            cause = self._broken(error)
        self._end(cause)

    def _serve(self) -> Exception:
        """Go round; return why that has ended."""
        participant = self._participant
        try:
            while not self._life.closing:
                self._go_round()
            self._inquiries.tell_digests(participant, now=True)
            self._control.send(m.GOODBYE)
            self._keep_promises()
        except LostElsewhere as error:
            participant.pipeline.settle(_SENT_S)
            participant.interrupt()  # others may wait for this rank in a collective
            return error.told()
        except PeerLost as error:
            cause = self._hearing.cause_of(error)
            if cause is error and error.ranks:
                # Whoever left in good order has done its part of what is under way.
                participant.pipeline.settle(_LAST_S)
            if cause is not error or not error.ranks or len(participant.places) > 1:
                participant.interrupt()  # a GPU would wait for that rank too, and block its users
            return cause
        except BrokenElsewhere as error:
            if self._life.closing:  # nobody here may ask any more
                log.error("%s", error)
            return EngineClosed(str(error))
        except BaseException as error:
            log.debug("the engine failed", exc_info=True)
            self._announce(in_words(error))
            participant.interrupt()  # others wait for this rank in a collective
            return self._broken(error)
        return EngineClosed("the engine was shut down")

    def _broken(self, error: BaseException) -> EngineClosed:
        """Return what callers here are told: what those on other ranks are, and the cause."""
        text = f"rank {self._participant.rank}: {in_words(error)}"
        broken = EngineClosed(str(BrokenElsewhere(text)))
        broken.__cause__ = error
        return broken

    def _go_round(self) -> None:
        participant = self._participant
        self._hearing.listen(self._patience())
        while (message := self._hearing.next()) is not None:
            participant.dispatch(message)
        participant.pipeline.advance()
        while self.released:
            participant.release(self.released.popleft())
        if self._hooks.has_errands:
            participant.pipeline.drain()
            self._hooks.run_errands()
        participant.encode_next()
        self._inquiries.ask(participant, self._life.closing)
        self._look_for_stalls()

    def _patience(self) -> float | None:
        """Return how long to wait for messages: not at all if there is something to do."""
        participant = self._participant
        if participant.complete or participant.pipeline.ready or self._life.closing:
            return 0.0
        return self._inquiries.patience(self._check_every)

    def _look_for_stalls(self) -> None:
        if self._check_every is not None:
            now = time.monotonic()
            if now - self._checked >= self._check_every:
                self._checked = now
                self._control.send(m.CHECK)

    def _keep_promises(self) -> None:
        """Run what this rank had voted for: others may be inside those collectives already."""
        deadline = time.monotonic() + _LEAVING_S
        while (left := deadline - time.monotonic()) > 0:
            self._hearing.listen(left)
            while (message := self._hearing.next()) is not None:
                if message[:1] == m.GONE and loads(message[1:]) == self._participant.rank:
                    self._participant.pipeline.drain()
                    return
                self._participant.dispatch(message)
            self._participant.pipeline.advance()

    def _announce(self, why: str) -> None:
        """Tell the other ranks, as far as that is still possible, why this one stops."""
        try:
            self._control.send(m.BROKEN + dumps(why))
        except Exception:
            log.debug("could not announce the failure", exc_info=True)

    def _end(self, error: Exception) -> None:
        self._life.end(error)
        try:
            self._participant.close(error)
        finally:
            hold(self, False)
            self._hooks.over()
