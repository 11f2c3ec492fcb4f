"""The fusion engine: what travels together, in which stream, and when."""

if __name__ != "ringlet.fusion":
    raise ImportError("import this package as ringlet.fusion, not as fusion")

from ringlet.fusion.engine import Engine
from ringlet.fusion.errors import (
    CompressionFailed,
    DuplicateName,
    EngineClosed,
    OutOfMemory,
    StepAbandoned,
)
from ringlet.fusion.group import Group
from ringlet.fusion.limits import Limits
from ringlet.fusion.request import Request
from ringlet.fusion.stats import Stats
from ringlet.fusion.work import Handle

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
