"""Several exchanges at a time, so that the wire works while codecs do.

An exchange is a generator of ``Wire``: collectives, with codec work between them. The thread that
owns a pipeline does the codec work; the collectives wait on threads of their own, one for each
place in an exchange ("lane"):

    lane 0    all-to-all 0, all-to-all 1, all-to-all 2, ...
    lane 1                  all-gather 0, all-gather 1, ...
    lane 2                                agreement 0, ...
    owner     encode 1, sum 0, encode 2, sum 1, decode 0, ...

Exchanges begin in one order on all ranks, lanes are first in, first out, and every lane has a
communicator of its own (``Communicator.sibling``). So collectives meet their like, whenever ranks
come to them. Exchanges that were given different lanes do not wait for each other at all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ringlet.ring.awake_clock import AwakeClock
from ringlet.ring.errors import ExchangeFailed, PeerLost
from ringlet.ring.interrupt import notify

DEPTH = 4  # exchanges under way at once; each holds what it has received
LOOK_S = 0.5  # between two looks at what may end a wait for all exchanges
_PATIENCE_S = 2.0  # for a lane whose collective was interrupted; gloo's may not come back


class Wire(NamedTuple):
    """A collective: ``call`` communicates, sends ``nbytes``, and touches nobody else's memory."""

    call: Callable[[], None]
    nbytes: float = 0.0


def _nothing() -> None:
    pass


# Yielded before any collective: wait until no other exchange is under way.
ALONE = Wire(_nothing)

Steps = Generator[Wire, None, None]  # what a collective raises is thrown into it


def _no_steps() -> Steps:
    yield from ()


def resume(steps: Steps, error: BaseException | None = None) -> Wire | None:
    """Return the next collective of ``steps``, which the last one's error is thrown into; or None.

    Raises what the steps raise, which includes an error that they take no care of.
    """
    try:
        return next(steps) if error is None else steps.throw(error)
    except StopIteration:
        return None


class PipelinedExchange:
    """An exchange under way.

    ``done`` is called at its end, ``timed(start, end, nbytes, lane)`` after each collective, both
    on the owner's thread; ``enter(lane)`` before each on the thread that makes it. Lanes count from
    1; 0 is the owner. An exchange that overlaps with others begins behind ``lanes_before``.
    """

    __slots__ = (
        "done", "end", "enter", "error", "lane", "lanes_before", "start", "steps", "timed", "wire"
    )  # fmt: skip

    def __init__(
        self,
        steps: Steps,
        done: Callable[[], None],
        timed: Callable[[float, float, float, int], None],
        enter: Callable[[int], None] | None = None,
        lanes_before: int = 0,
    ) -> None:
        self.steps, self.done, self.timed, self.enter = steps, done, timed, enter
        self.lanes_before = lanes_before
        self.lane = 0  # of its last collective
        self.start = self.end = 0.0
        self.error: BaseException | None = None  # of the collective

    def advance(self) -> bool:
        """Work until the next collective; return whether there is one.

        Raises what the last one did, unless the exchange takes care of it.
        """
        error, self.error = self.error, None
        wire = resume(self.steps, error)
        if wire is None:
            return False
        self.wire = wire
        return True

    def communicate(self) -> None:
        """Make the collective; an error is kept."""
        try:
            if self.enter is not None:
                self.enter(self.lane)
            self.start = time.perf_counter()
            self.wire.call()
        except BaseException as error:
            self.error = error
        self.end = time.perf_counter()

    def release(self) -> None:
        """Refer to no memory any more: a lane may hold this until its next exchange."""
        self.steps, self.wire, self.done = _no_steps(), ALONE, _nothing

    def report(self) -> None:
        """Tell of the collective."""
        if self.error is None:
            self.timed(self.start, self.end, self.wire.nbytes, self.lane)


class Pipeline:
    """Exchanges of one thread, its owner, in one order. ``wake`` is called when a lane is done.

    At most ``depth`` are under way, which the owner may change at any time; ranks need not agree.
    ``look``, which the owner may set, is called now and then while ``drain`` waits, as nothing else
    runs on this thread then; what it raises ends the wait.
    """

    def __init__(self, wake: Callable[[], None], depth: int = DEPTH, name: str = "") -> None:
        self._wake, self.depth, self._name = wake, depth, name
        self.look: Callable[[], None] = _nothing
        self._waiting: deque[PipelinedExchange] = deque()
        self._parked: PipelinedExchange | None = None  # until it is alone; nothing begins meanwhile
        self._under_way = 0
        # What a lane has done its collective of; None for one that was lost.
        self._completed: SimpleQueue[PipelinedExchange | None] = SimpleQueue()
        self._lanes: dict[int, SimpleQueue[PipelinedExchange | None]] = {}
        self._threads: list[threading.Thread] = []
        notify(self)

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way, or waits for its turn."""
        return self._under_way > 0 or bool(self._waiting)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` has something to do."""
        return not self._completed.empty()

    def add(self, exchange: PipelinedExchange, overlapping: bool = True) -> None:
        """Begin an exchange, or let it wait for its turn.

        One that is not ``overlapping`` has no lanes: it runs to its end now, after all others.
        """
        if overlapping:
            exchange.lane = exchange.lanes_before
            self._waiting.append(exchange)
            self._begin()
            return
        if self._under_way or self._waiting:
            self.drain()
        while exchange.advance():
            if exchange.wire is not ALONE:
                exchange.communicate()
                exchange.report()
        exchange.done()

    def advance(self) -> None:
        """Go on with what lanes have done. Raises what any collective or codec raised."""
        while not self._completed.empty():
            self._go_on(self._completed.get())
        if self._waiting:
            self._begin()

    def drain(self) -> None:
        """Wait for the end of all exchanges."""
        while self.busy:
            try:
                exchange = self._completed.get(timeout=LOOK_S)
            except Empty:
                self.look()
                continue
            self._go_on(exchange)
            self._begin()

    def settle(self, patience: float) -> None:
        """Let exchanges under way end, for ``patience`` seconds at most; one may fail, and then all
        are left alone. None begins.
        """
        clock = AwakeClock()  # where this rank stood still, others may have done so, too
        deadline = clock.now() + patience
        with suppress(BaseException):
            while self._under_way:
                left = clock.left(deadline)
                clock.sleep(left)
                try:
                    exchange = self._completed.get(timeout=left)
                except Empty:
                    if left <= 0:
                        return
                else:
                    self._go_on(exchange)

    def interrupt(self) -> None:
        """Count what is under way as lost if it has not ended in a while. From any thread."""
        if self._under_way:
            late = threading.Timer(_PATIENCE_S, self._completed.put, (None,))
            late.daemon = True
            late.start()

    def stop(self, interrupt: Callable[[], None]) -> None:
        """End the lanes. Where one waits in a collective, ``interrupt`` is called to end that."""
        if self._under_way:
            interrupt()
        for lane in self._lanes.values():
            lane.put(None)
        deadline = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._waiting.clear()
        self._parked = None

    def _begin(self) -> None:
        while self._waiting and self._under_way < self.depth and self._parked is None:
            self._under_way += 1
            self._work(self._waiting.popleft())

    def _go_on(self, exchange: PipelinedExchange | None) -> None:
        if exchange is None:
            raise PeerLost("a collective was interrupted and did not end")
        exchange.report()
        self._work(exchange)
        if self._parked is not None and self._under_way == 1:
            exchange, self._parked = self._parked, None
            self._work(exchange)

    def _work(self, exchange: PipelinedExchange) -> None:
        going = exchange.advance()
        while going and exchange.wire is ALONE and self._under_way == 1:
            going = exchange.advance()
        if going and exchange.wire is ALONE:
            self._parked = exchange
        elif going:
            exchange.lane += 1
            self._lane(exchange.lane - 1).put(exchange)
        else:
            self._under_way -= 1
            done = exchange.done
            exchange.release()
            done()

    def _lane(self, number: int) -> SimpleQueue[PipelinedExchange | None]:
        if number not in self._lanes:
            self._lanes[number] = SimpleQueue()
            name = f"{self._name}{number}"
            thread = threading.Thread(target=self._serve, args=(number,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._lanes[number]

    def _serve(self, number: int) -> None:
        lane = self._lanes[number]
        usable = True
        while (exchange := lane.get()) is not None:
            if usable:  # after other errors nobody meets this rank any more
                exchange.communicate()
                usable = exchange.error is None or isinstance(exchange.error, ExchangeFailed)
                self._completed.put(exchange)
                with suppress(Exception):  # the owner may have gone meanwhile
                    self._wake()
