"""What the coordinator has said and the engine has not yet acted on."""

from __future__ import annotations

import time
from collections import deque

from ringlet.fusion import messages as m
from ringlet.fusion.errors import EngineClosed
from ringlet.fusion.request import loads
from ringlet.ring.control import ControlPlane
from ringlet.ring.errors import PeerLost

_NAMING_S = 2.0  # how long to wait for the name of a rank that a transport lost


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
        """Return an error that names the rank and the cause, if the coordinator tells them soon."""
        deadline = time.monotonic() + _NAMING_S
        try:
            while not error.ranks:
                while (message := self.next()) is not None:
                    if message[:1] == m.LOST:
                        rank, text = loads(message[1:])
                        return PeerLost(text, [rank])
                    if message[:1] == m.BROKEN:
                        return EngineClosed(f"the engine broke on {loads(message[1:])}")
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self.listen(left)
        except PeerLost as gone:
            return gone
        return error
