"""What can be wrong with a compressor: its spec, its options, its result."""

from __future__ import annotations

import dataclasses
import difflib
import linecache
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

# What plugins call: an error in there is theirs.
_LIBRARIES = {*sys.stdlib_module_names, "cupy", "jax", "llvmlite", "numba", "numpy", "torch"}


class CompressorError(ValueError):
    """Base of every error about a compressor or its spec."""


class SpecError(CompressorError):
    """A spec string that cannot be read; the message shows the place with a caret."""


class UnknownCompressor(SpecError):
    """A spec names a compressor that nobody registered."""


class OptionError(CompressorError):
    """An option that a compressor does not have, or a value it does not take."""


class InputError(CompressorError, TypeError):
    """A compressor was given something other than a flat, contiguous float32 array."""


class PayloadError(CompressorError):
    """A compressor returned something that cannot travel, or received what it cannot decode."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or an empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def more_of(error: BaseException) -> str:
    """Return what a plugin's author wants to know besides an ``error``'s type and text.

    That is the place in the plugin, as " (file.py, line 9: ...)", and what to do about an error of
    Python's that does not say so.
    """
    advice = ""
    if isinstance(error, dataclasses.FrozenInstanceError):
        advice = "; compressors are immutable: what one remembers belongs into ctx.state"
    return advice + _place_in_plugin(error)


def _place_in_plugin(error: BaseException) -> str:
    """Return where in the first package that is neither ours nor a library ``error`` was raised."""
    package, place = None, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package is None and top not in _LIBRARIES and top != "ringlet":
            package = top
        if top == package:
            file = frame.f_code.co_filename
            code = linecache.getline(file, line, frame.f_globals).strip()
            place = f" ({Path(file).name}, line {line}: {code})" if code else place
    return place
