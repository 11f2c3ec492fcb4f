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


def of_distributed_checkpoint(frame: FrameType | None) -> bool:
    """Whether torch.distributed.checkpoint runs in ``frame``, or has called what runs there.

    Where an optimizer has no state yet, it lets it step with gradients and a learning rate of zero.
    Wrappers may stand between: ours, torch's and a scheduler's.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.distributed.checkpoint"):
            return True
        if not name.startswith(("ringlet.", "torch.optim.")):
            return False
        frame = frame.f_back
    return False


def mark(state: Mapping[str, Any], caller: FrameType) -> None:
    """Mark a ``state`` that holds something, or warn where ``caller`` will drop it."""
    if of_distributed_checkpoint(caller):
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
