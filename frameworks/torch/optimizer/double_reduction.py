"""DistributedDataParallel around what a reducer has: gradients would be reduced twice."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator
from typing import Any

import torch

from ringlet.job.session import current

TORCH_GROUP = "torch.process_group"  # in a runtime's extras: DDP may be at work over it


def refuse_ddp(reduced: Container[torch.Tensor]) -> None:
    """Raise RuntimeError where DistributedDataParallel reduces gradients of ``reduced`` too."""
    connected = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (connected or current().extras.get(TORCH_GROUP)):
        return
    if _is_in_ddp(reduced):
        gc.collect()  # one that was dropped lives on in its circles
        if _is_in_ddp(reduced):
            raise RuntimeError(
                "DistributedDataParallel reduces the gradients of this optimizer's parameters "
                "too: use DistributedOptimizer with the bare model, or DistributedDataParallel "
                "with hvd.ddp_hook and the bare optimizer"
            )


def living_ddps() -> Iterator[Any]:
    """Go through all DistributedDataParallel that are still there: torch keeps no list of them."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    return (found for found in gc.get_objects() if issubclass(type(found), wrapper))


def _is_in_ddp(reduced: Container[torch.Tensor]) -> bool:
    """Whether a DistributedDataParallel that is still there wraps a parameter of ``reduced``."""
    return any(p in reduced for found in living_ddps() for p in found.parameters())
