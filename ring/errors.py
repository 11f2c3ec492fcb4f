"""What can go wrong between ranks, as types a caller can tell apart."""

from __future__ import annotations

from collections.abc import Iterable

LOST_PEER = 75  # exit code of a rank that ended because another one went away first


class RingError(RuntimeError):
    """Base of every error that concerns more than one rank."""


class TransportUnavailable(RingError):
    """A transport was asked for that cannot work here; the message says what to install or set."""


class LaunchError(RingError):
    """The launcher's view of the job and the transport's differ, or the job could not start."""


class PeerLost(RingError):
    """A rank went away. ``ranks`` holds the lost ranks (empty when the transport cannot tell)."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Mismatch(RingError):
    """Ranks asked for different things under one name. The text is the same on every rank."""


class ProtocolError(RingError):
    """A control message or payload was malformed: wrong length, unknown kind, failed handshake."""


class ExchangeFailed(ProtocolError):
    """An exchange that all ranks gave up together, before any output was written.

    The text is the same on every rank, and the communicator can be used again. ``witness`` is the
    rank (of the communicator) that found the fault; if that was its codec's, there it is the cause.
    """

    def __init__(self, message: str, witness: int = 0) -> None:
        super().__init__(message)
        self.witness = witness


def unavailable(transport: str, why: str, remedy: str) -> TransportUnavailable:
    """Build the error for a transport that cannot be used, always with a way out."""
    return TransportUnavailable(f"transport {transport!r} is not available: {why}. {remedy}")


def again(error: RingError) -> RingError:
    """Return a new error of the same type and content, to raise once more."""
    return (
        PeerLost(str(error), error.ranks)
        if isinstance(error, PeerLost)
        else type(error)(*error.args)
    )
