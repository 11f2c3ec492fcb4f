"""A check of the kit: its name, why it matters, what to do, and which checks it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from ringlet.compressors.specs.parser import resolve
from ringlet.compressors.testing.tools.examples import told
from ringlet.compressors.testing.tools.patience import GivenUp, given_up_after

Check = Callable[[Any], None]

# Without these, whatever else is found says nothing new.
SOUND = (
    "every_length",
    "leaves_its_input_alone",
    "fills_its_output",
    "payload_travels",
    "fixed_size",
)
PURE = (*SOUND, "deterministic")

_PATIENCE = 300.0  # seconds for a check, which take a few at most


class CheckFailed(AssertionError):
    """A plugin broke a promise. The message says which, where, and why it matters."""


_WHY = "\nWhy it matters: "


def what_failed(failure: AssertionError) -> str:
    """Return what ``failure`` says without why it matters: who ran that check says it anew."""
    return str(failure).partition(_WHY)[0]


class Named:
    """A check with its name and its reason; calling it runs it.

    ``resolve`` makes the object to be checked of a spec, ``label`` is what messages call it. The
    first paragraph of the check's docstring is its reason, the second says what to do. ``needs``
    names the checks without which this one says nothing new: see ``needs``.
    """

    def __init__(
        self,
        check: Check,
        resolve: Callable[[Any], Any] = resolve,
        label: Callable[[Any], str] = str,
    ) -> None:
        self._resolve, self._label = resolve, label
        self.name = check.__name__.removeprefix("check_")
        why, _, cure = (check.__doc__ or "").partition("\n\n")
        self.why, self.cure = " ".join(why.split()), " ".join(cure.split())
        self.needs: tuple[str, ...] = getattr(check, "needs", ())
        self._check = check

    def __call__(self, plugin: Any) -> None:
        """Run the check on a plugin or spec; raises CheckFailed."""
        target = self._resolve(plugin)
        try:
            with given_up_after(_PATIENCE), exits_raised(), _place_kept():
                self._check(target)
        except (Exception, GivenUp, SystemExit) as error:
            reason = told(error)
            notes = "\n".join([*getattr(error, "__notes__", []), *_hints(error)])
            raise CheckFailed(
                f"{self._label(target)} fails {self.name!r}: {reason.strip()}"
                + (f"\n{notes}" if notes else "")
                + f"{_WHY}{self.why}"
                + (f"\nWhat to do: {self.cure}" if self.cure else "")
            ) from error

    def __repr__(self) -> str:
        return self.name


@contextmanager
def exits_raised() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit in this process: it would end the kit as if all was well.

    Children of it, which a plugin may have forked, end by it as ever.
    """
    owner, leave = os.getpid(), os._exit

    def raised(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raised
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def _place_kept() -> Iterator[None]:
    """Go back to this folder, and these cores: who leaves them is seen to do so in each check."""
    with ExitStack() as back:
        with suppress(OSError):  # it was removed
            back.callback(os.chdir, os.getcwd())
        if hasattr(os, "sched_setaffinity"):
            back.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        yield


def _hints(error: BaseException) -> list[str]:
    """Return what an error often means that does not say so itself."""
    if isinstance(error, GivenUp):
        return [
            f"It was given up after {_PATIENCE:.0f} seconds. A loop that ends when a threshold, or "
            "a count, fits does not end where none does: try equal values, zeros, NaN and Inf, and "
            "end it after so many turns."
        ]
    if isinstance(error, SystemExit):
        return ["To exit ends the user's program: raise CompressorError, which says why."]
    cause = error.__cause__ if isinstance(error, AssertionError) else error
    if not isinstance(cause, KeyError) or not isinstance((*cause.args, 0)[0], str):
        return []
    name = cause.args[0]
    return [
        f"If {name!r} is looked for in ctx.state: that may be empty at any step, not only at the "
        f"first, after a restart or for a new tensor; write ctx.state.get({name!r})."
    ]


def needs(*names: str) -> Callable[[Check], Check]:
    """Mark a check that would only repeat what the checks ``names`` have found already.

    Where one of them fails, it is not run, so that one cause is told once.
    """

    def mark(check: Check) -> Check:
        check.needs = names  # type: ignore[attr-defined]
        return check

    return mark
