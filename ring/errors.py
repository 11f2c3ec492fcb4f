"""What can go wrong between ranks, as types a caller can tell apart."""

from __future__ import annotations

from collections.abc import Iterable

TYPE_CHECKING = False  # as in typing, which every rank's heartbeat would have to import
if TYPE_CHECKING:
    from typing import TypeVar

    AnyError = TypeVar("AnyError", bound=BaseException)

LOST_PEER = 75  # exit code of a rank that ended because another one went away first


# What a limit of threads looks like: Python's words, and the system's (EAGAIN) in torch's.
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
MORE_THREADS = (
    "there may be no more threads; raise the limit of this user's processes (ulimit -u), or the "
    "container's (pids.max)"
)


def lacks_threads(error: BaseException) -> bool:
    """Whether ``error`` came of a limit of threads or processes."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_THREAD)


class RingError(RuntimeError):
    """Base of every error that concerns more than one rank."""


class TransportUnavailable(RingError):
    """A transport was asked for that cannot work here; the message says what to install or set."""


class LaunchError(RingError):
    """The launcher's view of the job and the transport's differ, or the job could not start."""


class PeerLost(RingError):
    """A rank went away, or a connection between two ranks that live.

    ``ranks`` holds the lost ranks, or those two (empty when the transport cannot tell). ``severed``
    are the ranks that the one which raises has no connection to any more, whether they live or not.
    """

    def __init__(
        self, message: str, ranks: Iterable[int] = (), severed: Iterable[int] = ()
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.severed = tuple(severed)


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


def again(error: AnyError) -> AnyError:
    """Return a new error of the same type and content, with the frames it came through so far.

    For errors that are kept and raised each time somebody asks: one object would gather the frames
    of every time. One that cannot be copied is returned itself.
    """
    fresh = _copied(error)
    if fresh is not error:
        if hasattr(error, "__notes__"):
            fresh.__notes__ = list(error.__notes__)
        fresh.__cause__, fresh.__context__ = error.__cause__, error.__context__
        fresh.__suppress_context__ = error.__suppress_context__
    return fresh.with_traceback(error.__traceback__)


def _copied(error: AnyError) -> AnyError:
    import copy  # which heartbeats have no use for

    kind = type(error)
    try:
        fresh = copy.copy(error)
        if type(fresh) is kind and str(fresh) == str(error):
            return fresh
    except Exception:  # its constructor takes something else than it keeps
        pass
    fresh = kind.__new__(kind, *error.args)
    fresh.__dict__.update(error.__dict__)
    return fresh if str(fresh) == str(error) else error
