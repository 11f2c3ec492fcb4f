"""What can be wrong with a submission, beyond what the ring itself reports."""

from __future__ import annotations

from ringlet.ring.errors import RingError


class DuplicateName(RingError, ValueError):
    """A name was submitted again before its earlier submission had finished."""


class EngineClosed(RingError):
    """The engine was shut down, or broke, or belongs to the parent of a forked process."""


class CompressionFailed(RingError):
    """A compressor raised on some rank; the message names rank, tensor and compressor."""


class StepAbandoned(RingError):
    """A rank gave up a step that others were in; the message names the rank and says why."""


class OutOfMemory(StepAbandoned):
    """A rank had no memory for a fusion buffer; the step can be repeated, in smaller buckets."""
