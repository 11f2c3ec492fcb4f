"""A function called as a rank, in a worker of Ray, Spark or Dask; and what came of it."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ringlet.job.session import shutdown
from ringlet.ring.errors import LaunchError, PeerLost
from ringlet.ring.functions import WorkerFailed
from ringlet.ring.launch.signed_pickle import pickler
from ringlet.ring.placed.embedded import embedded
from ringlet.ring.placed.ticket import Ticket

GRACE = 7.0  # seconds that ranks may take to notice that another one has failed
# Modules and functions of theirs that a worker calls before a call arrives: install_as_horovod().
beforehand: list[tuple[str, str]] = []


@contextmanager
def placed_rank(ticket: Ticket) -> Iterator[None]:
    """Let ``init`` in the block join the job as the rank that ``ticket`` says; leave it afterwards.

    See ``ringlet.ring.placed.embedded``. What the block has initialised and not shut down ends
    with it.
    """
    with embedded(ticket):
        try:
            yield
        finally:
            shutdown()


@dataclass(frozen=True)
class Account:
    """What came of a call on ``rank``: what it returned, or the text of its exception's traceback.

    ``value`` is pickled, and so is ``error``, the exception, where it can be. ``effect`` tells that
    it was raised for the loss of another rank. ``ended`` says how the rank's worker did, if it is
    gone.
    """

    rank: int
    value: bytes | None = None
    text: str = ""
    error: bytes | None = None
    effect: bool = False
    ended: str = ""


def account_of(
    ticket: Ticket, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Account:
    """Call ``fn(*args, **kwargs)`` as the rank of ``ticket``; raises nothing but what ends threads.

    Nor does anything that ``fn`` does by ``sys.exit`` end this process.
    """
    rank = ticket.standing.rank
    data = bytes(pickler().dumps(None))  # of a function that ends by sys.exit(0)
    try:
        with placed_rank(ticket):
            data = bytes(pickler().dumps(fn(*args, **kwargs)))
    except Exception as error:
        return account_of_error(rank, error)
    return Account(rank, data)


def account_of_error(rank: int, error: Exception) -> Account:
    """Return what is to be told of an exception that rank ``rank`` has raised."""
    text = "".join(traceback.format_exception(error))
    return Account(rank, None, text, _pickled(error), isinstance(error, PeerLost))


def _pickled(error: Exception) -> bytes | None:
    try:
        data = bytes(pickler().dumps(error))
        pickler().loads(data)
    except Exception:  # whatever an object's own reduction raises
        return None
    return data


def gathered(
    calls: Mapping[int, Any],
    wait: Callable[[Mapping[int, Any], float | None], Collection[int]],
    account: Callable[[int, Any], Account],
) -> dict[int, Account]:
    """Return the accounts of ``calls``, an engine's by rank; after a failure for GRACE s only.

    ``wait`` returns the ranks of some that have ended, or nothing when so many seconds are over;
    ``account`` returns the account of one.
    """
    waiting, found = dict(calls), dict[int, Account]()
    limit: float | None = None
    while waiting and (limit is None or time.monotonic() < limit):
        for rank in wait(waiting, None if limit is None else max(0.0, limit - time.monotonic())):
            found[rank] = account(rank, waiting.pop(rank))
            if found[rank].value is None and limit is None:
                limit = time.monotonic() + GRACE
    return found


def results(accounts: Sequence[Account]) -> list[Any]:
    """Return what the calls returned, by rank; raises WorkerFailed for the one that failed first.

    That is one which did not only lose another rank, if there is one. Its cause is the exception.
    """
    ordered = sorted(accounts, key=lambda account: account.rank)
    failed = [account for account in ordered if account.value is None]
    if failed:
        raise failure(min(failed, key=lambda account: account.effect))
    values = []
    for account in ordered:
        try:
            values.append(pickler().loads(account.value))
        except Exception as error:
            raise LaunchError(
                f"the result of rank {account.rank} cannot be read: {error}"
            ) from error
    return values


def failure(account: Account) -> WorkerFailed:
    """Return the error that tells of an account's exception."""
    what = account.ended or f"raised\n{account.text}"
    said = WorkerFailed(f"rank {account.rank} {what}", account.rank, account.text)
    if account.error is not None:
        said.__cause__ = pickler().loads(account.error)
    return said


def packed(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """Return a call as bytes for ``unpacked``: function, arguments and named arguments.

    Raises TypeError for what cannot be called, LaunchError for what cannot be pickled.
    """
    if not callable(fn):
        raise TypeError(f"a function to call on every rank is needed, not {fn!r}")
    try:
        first = [_Beforehand(*each) for each in beforehand]
        return bytes(pickler().dumps((first, fn, tuple(args), dict(kwargs or {}))))
    except Exception as error:  # whatever an object's own reduction raises
        raise LaunchError(f"the function or its arguments cannot be sent: {error}") from None


def unpacked(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return function, arguments and named arguments of what ``packed`` has made."""
    _, fn, args, kwargs = pickle.loads(call)
    return fn, args, kwargs


def called(call: bytes) -> Any:
    """Call what ``packed`` has made; return what it returns."""
    fn, args, kwargs = unpacked(call)
    return fn(*args, **kwargs)


@dataclass(frozen=True)
class _Beforehand:
    """A function that is called where this is unpickled, by name: the module may be a script."""

    module: str
    function: str

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        return _begin, (self.module, self.function)


def _begin(module: str, function: str) -> object:
    return getattr(import_module(module), function)()
