"""What the coordinator has said and the engine has not yet acted on."""

from __future__ import annotations

import time
from collections import deque

from ringlet.fusion import messages as m
from ringlet.fusion.errors import BrokenElsewhere, EngineClosed, LostElsewhere
from ringlet.fusion.request import dumps, loads
from ringlet.ring.control import ControlPlane
from ringlet.ring.errors import PeerLost

_ENDING_S = 0.5  # how long the end of a rank may take to be known, once its connections have ended
_NAMING_S = 2.0  # how long to wait for the coordinator's word on a connection that broke


class Hearing:
    """Messages in order. One that was received is kept when acting on an earlier one fails."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._heard: deque[bytes] = deque()

    def listen(self, patience: float | None) -> None:
        """Wait up to ``patience`` seconds, or for as long as it takes, for messages or a wake-up.

        Raises PeerLost when the coordinator is gone.
        """
        self._heard.extend(self._control.receive(patience))

    def next(self) -> bytes | None:
        """Return the next message, or None."""
        return self._heard.popleft() if self._heard else None

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
        deadline = time.monotonic() + patience
        while True:
            while (message := self.next()) is not None:
                if message[:1] == m.LOST:
                    ranks, text = loads(message[1:])
                    return LostElsewhere(text, ranks).told()
                if message[:1] == m.BROKEN:
                    return EngineClosed(str(BrokenElsewhere(loads(message[1:]))))
            left = deadline - time.monotonic()
            self.listen(max(0.0, left))
            if left <= 0 and not self._heard:
                return None
