"""Properties over examples: the same ones in every run, and of those that fail a small one.

What a check says of a compressor must depend neither on luck nor on what else the process has
loaded, so that nothing is drawn: examples come in a fixed order, and what fails is made smaller by
leaving out and simplifying elements for as long as it still fails (Zeller and Hildebrandt,
"Simplifying and isolating failure-inducing input", IEEE TSE 2002).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.errors import more_of

_TRIES = 400  # of smaller examples
_OURS = "ringlet.compressors.testing"
_CALLS_CHECKS = f"{_OURS}.tools.named_check"
_FEW = 12  # elements that are simplified one by one


def for_all(examples: Iterable[Array], body: Callable[[Array], None]) -> None:
    """Run ``body`` on every example; AssertionError where one fails, which shows a smaller one.

    ``body`` raises whatever it likes, and leaves its argument as it is.
    """
    for example in examples:
        error = _raised(body, example)
        if error is not None:
            smallest, error = _smallest(body, example, error)
            message = told(error)
            with np.printoptions(threshold=20, edgeitems=5):
                shown = repr(smallest)
            raise AssertionError(f"{message.strip()}\nSmallest example: {shown}") from error


def told(error: BaseException) -> str:
    """Return what a check says, or an error with its place in the plugin if it is of there.

    A plugin may have assertions of its own.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    *calling, raising = ["", *(str(frame.f_globals.get("__name__")) for frame in frames)]
    ours = raising.startswith(_OURS) or calling[-1:] in ([__name__], [_CALLS_CHECKS])
    if isinstance(error, AssertionError) and ours:
        return str(error)
    return f"{type(error).__name__}: {error}{more_of(error)}"


def _raised(body: Callable[[Array], None], x: Array) -> Exception | None:
    try:
        body(x.copy())
    except Exception as error:
        return error
    return None


def _smallest(body: Callable[[Array], None], x: Array, error: Exception) -> tuple[Array, Exception]:
    """Return the smallest example found that fails with the same type of error, and its error."""
    tries, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in _simpler(x):
            tries += 1
            if tries > _TRIES:
                return x, error
            found = _raised(body, candidate)
            if type(found) is type(error) and found is not None:
                x, error, smaller = candidate, found, True
                break
    return x, error


def _simpler(x: Array) -> Iterator[Array]:
    """Yield what is simpler than ``x``: pieces left out, the largest first, then plainer values."""
    size = x.size
    while size:
        for start in range(0, x.size, size):
            yield np.delete(x, slice(start, start + size))
        size //= 2
    if x.any():
        yield np.zeros_like(x)
    for plain in (np.where(x == 0, x, np.float32(1)), np.rint(x)):
        if not np.array_equal(plain, x, equal_nan=True) and _complexity(plain) < _complexity(x):
            yield plain
    for place in range(x.size if x.size <= _FEW else 0):
        for value in (0, 1, -1):
            if _complexity(np.array([value], np.float32)) < _complexity(x[place : place + 1]):
                plain = x.copy()
                plain[place] = value
                yield plain


def _complexity(x: Array) -> int:
    """Return how far the values are from 0, 1 and other whole numbers, element by element."""
    return int(np.where(x == 0, 0, np.where(x == 1, 1, np.where(x == np.rint(x), 2, 3))).sum())
