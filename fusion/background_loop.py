"""The engine's thread: it compresses what is complete, votes, asks, and does what is announced."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress

from ringlet.fusion.buckets.group import Group
from ringlet.fusion.errors import BrokenElsewhere, EngineClosed, LostElsewhere, in_words
from ringlet.fusion.extensions import Extensions
from ringlet.fusion.lifetime import Lifetime
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.queue.requester import Requester
from ringlet.fusion.requests.request import dumps
from ringlet.fusion.worker import Worker
from ringlet.ring.awake_clock import AwakeClock
from ringlet.ring.control.plane import ControlPlane
from ringlet.ring.errors import PeerLost
from ringlet.ring.interrupt import hold
from ringlet.ring.pipeline import LOOK_S

log = logging.getLogger("ringlet")

_ENDING_S = 0.5  # how long the end of a rank may take to be known, once its connections have ended
_NAMING_S = 2.0  # how long to wait for the coordinator's word on a connection that broke
_LAST_S = 2.0  # for exchanges under way when a rank has left
_SENT_S = 0.3  # for what a rank had sent before it was lost
_LOOKS = 3  # in a row that found a connection ended: gloo tells of most, and works on what had come
_LEAVING_S = 10.0  # how long to wait until the coordinator has heard the goodbye
_LAST_LOOKS = round(_LEAVING_S / LOOK_S)  # instead of ``_LOOKS``, while this rank leaves
_LONGEST_S = 3600.0  # of one wait: some say "never" with more than poll takes, 24 days


class Announcements:
    """Messages in order. One that was received is kept when acting on an earlier one fails."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._heard: deque[bytes] = deque()
        self._left: str | None = None  # why rank 0 has left, once it has

    def listen(self, patience: float | None) -> None:
        """Wait up to ``patience`` seconds, or for as long as it takes, for messages or a wake-up.

        Raises PeerLost when the coordinator is gone, with why where that has been told.
        """
        try:
            heard = self._control.receive(patience)
        except PeerLost:
            if self._left is None:
                raise
            raise PeerLost(self._left, [0]) from None
        for message in heard:
            if (left := m.unpack_gone(message)) is not None and left[0] == 0:
                self._left = left[1]
        self._heard.extend(heard)

    def next(self) -> bytes | None:
        """Return the next message, or None."""
        return self._heard.popleft() if self._heard else None

    def look_for_end(self) -> None:
        """Raise the coordinator's word on what ends this engine, if it has come. Never waits."""
        with suppress(PeerLost):  # a rank 0 that has left in good order has done its part
            self.listen(0.0)
            self._control.wake()  # what was taken may have been a wake-up, for the next to listen
        for message in self._heard:
            if (end := m.unpack_end(message)) is not None:
                raise end

    def cause_of(self, error: PeerLost) -> Exception:
        """Return the coordinator's word on why ``error`` came, which all ranks hear; or ``error``.

        Where a collective failed and no rank is known to have ended, the coordinator is told which
        connections this one has lost: it names the first that it is told of.
        """
        try:
            cause = self._told(0.0 if error.ranks else _ENDING_S)
            if cause is None and not error.ranks:
                self._control.send(m.SEVERED + dumps([error.severed, str(error)]))
                cause = self._told(_NAMING_S)
        except PeerLost as gone:
            return gone if not error.ranks else error
        return cause or error

    def _told(self, patience: float) -> Exception | None:
        """Return the coordinator's word on what ends this engine, if it comes in time.

        Raises PeerLost when the coordinator is gone, and all that it had said has been read.
        """
        clock = AwakeClock()  # the coordinator may have stood still with this rank
        deadline = clock.now() + patience
        while True:
            while (message := self.next()) is not None:
                if (end := m.unpack_end(message)) is not None:
                    return end.told()
            left = clock.left(deadline)
            clock.sleep(left)
            self.listen(left)
            if left <= 0 and not self._heard:
                return None


class Loop:
    """What the thread runs until the engine ends. ``check_every`` (seconds) looks for stalls."""

    def __init__(
        self,
        control: ControlPlane,
        worker: Worker,
        requester: Requester,
        extensions: Extensions,
        life: Lifetime,
        check_every: float | None,
    ) -> None:
        self.released: deque[Group] = deque()  # groups to forget
        self._control, self._worker, self._requester = control, worker, requester
        self._extensions, self._life = extensions, life
        self._announcements = Announcements(control)
        self._check_every, self._checked = check_every, time.monotonic()
        self._looked = time.monotonic()  # at connections, last
        self._severed = 0  # looks in a row that found one ended
        worker.pipeline.look = self._look_while_draining
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
        worker = self._worker
        try:
            while not self._life.closing:
                self._go_round()
            self._requester.tell_digests(worker, now=True)
            self._control.send(m.GOODBYE + dumps(self._life.why))
            self._keep_promises()
        except LostElsewhere as error:
            worker.pipeline.settle(_SENT_S)
            worker.interrupt()  # others may wait for this rank in a collective
            return error.told()
        except PeerLost as error:
            if self._life.closing and not worker.pipeline.busy:
                return _shut_down()  # others, the coordinator among them, may have left before
            cause = self._announcements.cause_of(error)
            if cause is error and error.ranks:
                # Whoever left in good order has done its part of what is under way.
                worker.pipeline.settle(_LAST_S)
            if cause is not error or not error.ranks or len(worker.places) > 1:
                worker.interrupt()  # a GPU would wait for that rank too, and block its users
            return cause
        except BrokenElsewhere as error:
            if self._life.closing:  # nobody here may ask any more
                log.error("%s", error)
            elif len(worker.places) > 1:  # a GPU would wait for the engine that broke
                worker.pipeline.settle(_SENT_S)
                worker.interrupt()
            return error.told()
        except BaseException as error:
            log.debug("the engine failed", exc_info=True)
            self._announce(in_words(error))
            worker.interrupt()  # others wait for this rank in a collective
            return self._broken(error)
        return _shut_down()

    def _broken(self, error: BaseException) -> EngineClosed:
        """Return what callers here are told: what those on other ranks are, and the cause."""
        text = f"rank {self._worker.rank}: {in_words(error)}"
        broken = BrokenElsewhere(text).told()
        broken.__cause__ = error
        return broken

    def _go_round(self) -> None:
        worker = self._worker
        self._announcements.listen(self._patience())
        if self._extensions.soon:  # first: what was heard with it may have come of it
            worker.pipeline.drain()
            self._extensions.run_soon()
        while (message := self._announcements.next()) is not None:
            worker.dispatch(message)
        worker.pipeline.advance()
        self._look_at_connections()
        while self.released:
            worker.release(self.released.popleft())
        if worker.complete:
            worker.encode_next()
        self._requester.ask(worker, self._life.closing)
        self._look_for_stalls()

    def _patience(self) -> float | None:
        """Return how long to wait for messages: not at all if there is something to do."""
        worker = self._worker
        if worker.complete or worker.pipeline.ready or self._life.closing:
            return 0.0
        patience = self._requester.patience(self._check_every)
        if patience is None and not worker.pipeline.busy:
            return None
        longest = LOOK_S if worker.pipeline.busy else _LONGEST_S
        return longest if patience is None else min(patience, longest)

    def _look_while_draining(self) -> None:
        """Raise what a round would find that ends exchanges which cannot end by themselves."""
        self._announcements.look_for_end()
        self._look_at_connections()

    def _look_at_connections(self) -> None:
        """Raise PeerLost where an exchange can never end: gloo does not tell of every message.

        What a rank that has left in good order sent before may still be on its way to a lane; most
        leave while this one does.
        """
        now = time.monotonic()
        if not self._worker.pipeline.busy:
            self._severed = 0
        elif now - self._looked >= LOOK_S:
            self._looked = now
            severed = self._worker.severed()
            self._severed = self._severed + 1 if severed else 0
            if self._severed == (_LAST_LOOKS if self._life.closing else _LOOKS):
                why = "a connection ended while a message was on its way"
                raise PeerLost(why, severed=severed)

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
            self._announcements.listen(left)
            while (message := self._announcements.next()) is not None:
                gone = m.unpack_gone(message)
                if gone is not None and gone[0] == self._worker.rank:
                    self._worker.pipeline.drain()
                    return
                self._worker.dispatch(message)
            self._worker.pipeline.advance()

    def _announce(self, why: str) -> None:
        """Tell the other ranks, as far as that is still possible, why this one stops."""
        try:
            self._control.send(m.BROKEN + dumps(why))
        except Exception:
            log.debug("could not announce the failure", exc_info=True)

    def _end(self, error: Exception) -> None:
        self._life.end(error)
        try:
            self._worker.close(error)
        finally:
            hold(self, False)
            self._extensions.over()


def _shut_down() -> EngineClosed:
    return EngineClosed(
        "the engine was shut down; after init() make anew what was made before it: wrap "
        "optimizers again, which keeps residuals"
    )
