"""DistributedDataParallel around what a reducer has: gradients would be reduced twice."""

from __future__ import annotations

import gc

import torch

from ringlet.job.session import current
from ringlet.torch.optimizer.grad_hooks import GradHooks

TORCH_GROUP = "torch.process_group"  # in a runtime's extras: DDP may be at work over it


def refuse_ddp(hooks: GradHooks) -> None:
    """Raise RuntimeError where DistributedDataParallel reduces the gradients of ``hooks`` too."""
    connected = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not (connected or current().extras.get(TORCH_GROUP)):
        return
    if _is_in_ddp(hooks):
        gc.collect()  # one that was dropped lives on in its circles
        if _is_in_ddp(hooks):
            raise RuntimeError(
                "DistributedDataParallel reduces the gradients of this optimizer's parameters "
                "too: use DistributedOptimizer with the bare model, or DistributedDataParallel "
                "with hvd.ddp_hook and the bare optimizer"
            )


def _is_in_ddp(hooks: GradHooks) -> bool:
    """Whether a DistributedDataParallel that is still there wraps a parameter of ``hooks``."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    return any(  # DDP keeps no list of what it wraps
        issubclass(type(found), wrapper) and any(p in hooks for p in found.parameters())
        for found in gc.get_objects()
    )
