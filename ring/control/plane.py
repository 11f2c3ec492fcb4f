"""The control plane: small messages between every rank and the coordinator on rank 0.

Data moves through a communicator; agreement on what to move goes through here, so that a waiting
rank costs no CPU, and so that a rank that fails can be named while the others wait for it.
Messages from one rank arrive in order; broadcasts reach every rank in one and the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol


class Handler(Protocol):
    """The coordinator's logic; runs on rank 0 only, one call at a time, on any thread."""

    def on_message(self, rank: int, message: bytes) -> list[bytes]:
        """Take a message of ``rank``; return what is to be broadcast to every rank."""

    def on_lost(self, rank: int, why: str = "") -> list[bytes]:
        """Learn that ``rank`` went away without saying goodbye; return what to broadcast.

        ``why`` is how that shows, if not by the end of its connection.
        """


class ControlPlane(ABC):
    """One rank's end of the control plane."""

    rank: int
    size: int

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Send ``message`` to the coordinator. From any thread.

        Raises nothing when the coordinator is gone: ``receive`` does, once all that it has said has
        been taken.
        """

    @abstractmethod
    def receive(self, timeout: float | None = None) -> list[bytes]:
        """Return the broadcasts that arrived since the last call, in order; one thread only.

        Waits until there is one, ``wake`` is called, or ``timeout`` seconds pass (then the list
        is empty). Raises PeerLost when the coordinator is gone.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting (or the next) ``receive`` return at once.

        From any thread, and from finalisers: it takes no lock.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and release the connection. Idempotent; never raises."""
