"""Where a state_dict loses what compressors remember: torch keeps a state and groups, no more.

A mark in the first parameter group tells that there was something: who loads a state into the
original optimizer, and wraps that then, would hear nothing otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from ringlet.ring.callers import outside

_MARK = "ringlet_remembers"


def mark(state: Mapping[str, Any], caller: FrameType) -> None:
    """Mark a ``state`` that holds something, or warn where ``caller`` will drop it."""
    if caller.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
        warnings.warn(
            "torch.distributed.checkpoint leaves out what compression holds back on this rank: "
            "save kept = optimizer.state_dict()['ringlet'] beside the checkpoint, one file a rank, "
            "and once that is loaded call optimizer.load_state_dict({**optimizer.state_dict(), "
            "'ringlet': kept})",
            stacklevel=outside(),
        )
    elif state["param_groups"]:
        state["param_groups"][0][_MARK] = True


def take_mark(groups: Sequence[dict[str, Any]]) -> bool:
    """Remove the mark from parameter ``groups``; return whether it was there."""
    found = [group.pop(_MARK, False) for group in groups]
    return any(found)


def warn_of_loaded_too_early() -> None:
    """Warn that a state was loaded into an optimizer before that was wrapped."""
    warnings.warn(
        "a state_dict was loaded into the optimizer before DistributedOptimizer wrapped it, which "
        "drops what compression had held back: wrap first, and load into what "
        "DistributedOptimizer returns",
        stacklevel=outside(),
    )
