"""The engine's errors, beside the ring's, and how they name tensors and tell of plugins."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from traceback import walk_tb
from typing import Self

from ringlet.compressors import Compressor, CompressorError
from ringlet.compressors.base.nesting import overrides
from ringlet.compressors.core.errors import more_of
from ringlet.ring.errors import MORE_THREADS, PeerLost, RingError, lacks_threads

_LONGEST = 2000  # characters of an error's text that other ranks are told
_NAMED = 3  # tensors that a message names


class DuplicateName(RingError, ValueError):
    """A name was submitted again before its earlier submission had finished."""


class EngineClosed(RingError):
    """The engine was shut down, or broke, or belongs to the parent of a forked process."""


def refuse_forked(owner: int) -> None:
    """Raise EngineClosed in a process that was forked from ``owner``, the engine's."""
    if os.getpid() != owner:
        raise EngineClosed(
            "this process was forked after init; the engine lives in the parent. "
            "Start workers with 'spawn', or call init in the child only"
        )


class BrokenElsewhere(Exception):
    """What ended another rank's engine, and so this one: ``text`` names the rank and says why."""

    def __init__(self, text: str) -> None:
        super().__init__(f"the engine broke on {text}")

    def told(self) -> EngineClosed:
        """Return what callers are told."""
        return EngineClosed(str(self))


class LostElsewhere(Exception):
    """The coordinator's word on which ranks are lost, or have lost each other, and why."""

    def __init__(self, text: str, ranks: Iterable[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)

    def told(self) -> PeerLost:
        """Return what callers are told."""
        return PeerLost(str(self), self.ranks)


# By our functions that look at what a plugin returned: what of it that was.
_CALLED = {"check_payload": "compress", "check_round": "exchange", "check_generator": "exchange"}
# By methods that compressors inherit: what of theirs these call.
_WRITTEN = {"sum_into": "decompress", "encode_into": "compress"}


class CompressionFailed(RingError):
    """A compressor raised on some rank; the message names rank, tensor and compressor."""

    @classmethod
    def of(
        cls,
        compressor: Compressor,
        function: Callable[..., object],
        what: str,
        error: BaseException,
    ) -> Self:
        """Return what to raise for an ``error`` of ``function``, called for tensors ``what``."""
        own = isinstance(error, CompressorError)
        reason = str(error) if own else in_words(error) + more_of(error)
        called = _CALLED.get(function.__name__, function.__name__)
        if called in _WRITTEN and not overrides(compressor, called):
            called = _WRITTEN[called]
        return cls(f"compressor {str(compressor)!r} failed in {called} of {what}: {reason}")


def raised_by_a_signal(error: BaseException) -> bool:
    """Whether a signal's handler raised ``error``, such as Ctrl-C's, in whatever ran just then."""
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run on that one
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None))}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def tensors_in_words(names: Iterable[str], shape: Sequence[int]) -> str:
    """Return what a message calls tensors: a few names, or the only one and its ``shape``."""
    known = list(dict.fromkeys(names))
    told = ", ".join(map(repr, known[:_NAMED]))
    if len(known) == 1:
        return f"tensor {told} {list(shape)}"
    more = len(known) - _NAMED
    return f"tensors {told}" + (f" and {more} more" if more > 0 else "")


def in_words(error: BaseException) -> str:
    """Return type and text of ``error``, which may be a plugin's: of any kind and length."""
    try:
        text = str(error)
    except Exception as another:
        text = f"its text cannot be had: {type(another).__name__}"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    if lacks_threads(error) and not isinstance(error, RingError):
        text = f"{text}: {MORE_THREADS}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class StepAbandoned(RingError):
    """A rank gave up a step that others were in; the message names the rank and says why."""


class OutOfMemory(StepAbandoned):
    """A rank had no memory for a fusion buffer; the step can be repeated, in smaller buckets."""
