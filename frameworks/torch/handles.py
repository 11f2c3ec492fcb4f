"""Handles of operations under way, and how autograd goes through an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringlet.fusion import Handle as EngineHandle


class Handle:
    """An operation under way; ``synchronize`` it for its result."""

    def __init__(
        self, operation: EngineHandle, result: Callable[[EngineHandle], torch.Tensor]
    ) -> None:
        self._operation = operation
        self._result = result

    @property
    def name(self) -> str:
        """The operation's name, which is the same on every rank."""
        return self._operation.name

    @property
    def sizes(self) -> tuple[int, ...]:
        """First dimension of every rank's part, by rank, once an all-gather has finished."""
        return self._operation.sizes

    def done(self) -> bool:
        """Whether the operation has finished."""
        return self._operation.done()

    def wait(self) -> torch.Tensor:
        """Wait, and return the result; raises what went wrong, the same on every rank."""
        self._operation.wait()
        return self._result(self._operation)


Start = Callable[[torch.Tensor], Handle]
Backward = Callable[[torch.Tensor, Handle], torch.Tensor]


def differentiable(tensor: Any, start: Start, backward: Backward) -> torch.Tensor:
    """Return the result of the operation that ``start(tensor)`` begins.

    Where a gradient is wanted it is ``backward(gradient, handle)``: a collective as well, so ranks
    have to run backward together.
    """
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        apply: Any = _Collective.apply
        result: torch.Tensor = apply(tensor, start, backward)
        return result
    return start(tensor).wait()


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, start: Start, backward: Backward) -> torch.Tensor:
        ctx.handle, ctx.collective = start(tensor), backward
        result: torch.Tensor = ctx.handle.wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.collective(grads[0], ctx.handle), None, None
