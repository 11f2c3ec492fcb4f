"""The fusion engine: what travels together, in which stream, and when."""

if __name__ != "ringlet.fusion":
    raise ImportError("import this package as ringlet.fusion, not as fusion")

from ringlet.fusion.buckets.group import Group
from ringlet.fusion.engine import Engine
from ringlet.fusion.errors import (
    CompressionFailed,
    DuplicateName,
    EngineClosed,
    OutOfMemory,
    StepAbandoned,
)
from ringlet.fusion.limits import Limits
from ringlet.fusion.recording.stats import Stats
from ringlet.fusion.requests.handle import Handle
from ringlet.fusion.requests.request import Request

__all__ = [
    "CompressionFailed",
    "DuplicateName",
    "Engine",
    "EngineClosed",
    "Group",
    "Handle",
    "Limits",
    "OutOfMemory",
    "Request",
    "Stats",
    "StepAbandoned",
]
