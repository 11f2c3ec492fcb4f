"""Collectives that autograd can go through: each one's backward is a collective as well.

Ranks must therefore run backward through them together. Compression concerns the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringlet.ring.communicator import ReduceOp
from ringlet.runtime import current

Forward = Callable[[torch.Tensor], torch.Tensor]
Backward = Callable[[torch.Tensor], torch.Tensor]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, forward: Forward, backward: Backward
    ) -> torch.Tensor:
        ctx.backward_collective = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_collective(grads[0]), None, None


def differentiable(tensor: Any, forward: Forward, backward: Backward) -> torch.Tensor:
    """Return ``forward(tensor)``, with ``backward`` as its gradient where one is wanted."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Collective.apply(tensor, forward, backward)
        return result
    return forward(tensor)


def of_allreduce(
    reduce: Callable[[torch.Tensor], torch.Tensor], op: ReduceOp
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the backward of an allreduce by ``op``: the same allreduce of the gradients."""

    def backward(grad: torch.Tensor) -> torch.Tensor:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(f"allreduce with op={op.name.title()} has no gradient")
        return reduce(grad)

    return backward


def of_allgather(total: Backward, rows: Callable[[], list[int]]) -> Backward:
    """Return the backward of an all-gather: this rank's rows of the summed gradients."""

    def backward(grad: torch.Tensor) -> torch.Tensor:
        counts, rank = rows(), current().rank
        return total(grad)[sum(counts[:rank]) : sum(counts[: rank + 1])]

    return backward


def of_broadcast(total: Backward, root: int) -> Backward:
    """Return the backward of a broadcast: the sum of the gradients for the root, else zeros."""

    def backward(grad: torch.Tensor) -> torch.Tensor:
        summed = total(grad)
        return summed if current().rank == root else torch.zeros_like(summed)

    return backward
