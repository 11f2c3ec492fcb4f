"""What can be wrong with a compressor: its spec, its options, its result."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
