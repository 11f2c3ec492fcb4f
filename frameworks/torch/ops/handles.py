"""Handles of operations under way, and how autograd goes through an operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringlet.fusion import Handle
from ringlet.fusion.requests.handle import wait_all
from ringlet.ring.errors import RingError
from ringlet.torch.ops.entry_points import public, untraced
from ringlet.torch.tensors.views import note_written

Tensors = Sequence[torch.Tensor]
Result = Any  # a tensor, a list of them, or what an operation returns beside its tensor


class TorchHandle:
    """One or more operations under way; ``synchronize`` it for what they return."""

    def __init__(
        self,
        operations: Sequence[Handle],
        result: Callable[[Sequence[Handle]], Result],
    ) -> None:
        self._operations = list(operations)
        self._result = result

    @property
    def name(self) -> str:
        """The first operation's name, which is the same on every rank."""
        return self._operations[0].name if self._operations else ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """What an all-gather, all-to-all or reduce-scatter brought, in rows by rank."""
        return self._operations[0].sizes

    @property
    def all_sizes(self) -> list[tuple[int, ...]]:
        """``sizes`` of every operation."""
        return [operation.sizes for operation in self._operations]

    def done(self) -> bool:
        """Whether all operations have finished."""
        return all(operation.done() for operation in self._operations)

    def wait(self) -> Result:
        """Wait, and return the result; raises what went wrong, the same on every rank."""
        wait_all(self._operations)
        return self._outcome()

    def _outcome(self) -> Result:
        return self._result(self._operations)


class WrittenHandle(TorchHandle):
    """Operations under way whose results the engine writes to ``outputs`` itself.

    It returns a list of those, or the ``single`` one.
    """

    def __init__(self, operations: Sequence[Handle], outputs: Tensors, single: bool) -> None:
        self._operations = list(operations)
        self._outputs, self._single = outputs, single

    def _outcome(self) -> Result:
        for output in self._outputs:
            note_written(output)
        return self._outputs[0] if self._single else list(self._outputs)


class WrittenTensor(TorchHandle):
    """One ``operation`` under way whose result the engine writes to ``output`` itself."""

    def __init__(self, operation: Handle, output: torch.Tensor) -> None:
        self._operation, self._output = operation, output

    @property
    def name(self) -> str:
        """The operation's name, which is the same on every rank."""
        return self._operation.name

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nothing: ranks' shares are of one size."""
        return self._operation.sizes

    @property
    def all_sizes(self) -> list[tuple[int, ...]]:
        """``sizes`` of the operation."""
        return [self._operation.sizes]

    def done(self) -> bool:
        """Whether the operation has finished."""
        return self._operation.done()

    def wait(self) -> torch.Tensor:
        """Wait, and return the tensor; raises what went wrong, the same on every rank."""
        self._operation.wait()
        return self._outcome()

    def _outcome(self) -> torch.Tensor:
        note_written(self._output)
        return self._output


class SparseHandle:
    """A sparse reduction under way: call it, or ``synchronize`` it, for the sparse tensor."""

    def __init__(self, handles: Sequence[TorchHandle], result: Callable[..., torch.Tensor]) -> None:
        self._handles, self._result = list(handles), result

    def done(self) -> bool:
        """Whether indices and values have arrived."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> torch.Tensor:
        """Wait, and return the sparse tensor."""
        return self._result(*wait_all(self._handles))

    def forget(self) -> None:
        """Wait for what is under way, and ignore how it ends."""
        for handle in self._handles:
            with contextlib.suppress(RingError):
                handle.wait()

    __call__ = wait


@public
def poll(handle: TorchHandle | SparseHandle) -> bool:
    """Whether ``synchronize(handle)`` would return at once. TypeError for what is no handle."""
    return _checked(handle).done()


@public
def synchronize(handle: TorchHandle | SparseHandle) -> Result:
    """Wait for an asynchronous operation and return its result.

    Raises TypeError for what is no handle, such as one of Horovod's numbers.
    """
    return _checked(handle).wait()


def _checked(handle: TorchHandle | SparseHandle) -> TorchHandle | SparseHandle:
    if not isinstance(handle, (TorchHandle, SparseHandle)):
        raise TypeError(
            "a handle is what an asynchronous operation returned, such as hvd.allreduce_async(); "
            f"this is {type(handle).__name__}. Of several, wait for each"
        )
    return handle


Start = Callable[[Tensors], TorchHandle]
Backward = Callable[[Tensors, TorchHandle], Tensors]


def differentiable(tensors: Any, start: Start, backward: Backward) -> Result:
    """Return the result of the operation that ``start(tensors)`` begins.

    Where gradients are wanted they are ``backward(gradients, handle)``: a collective as well, so
    ranks have to run backward together. It has to be differentiable itself, for second derivatives.
    """
    tracked = any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    if not (tracked and torch.is_grad_enabled()):
        return start(tensors).wait()
    apply: Any = _Collective.apply
    result = apply(start, backward, *tensors)
    return list(result) if isinstance(result, tuple) else result


class _Collective(torch.autograd.Function):
    @staticmethod
    @untraced
    def forward(ctx: Any, start: Start, backward: Backward, *tensors: torch.Tensor) -> Any:
        ctx.handle, ctx.collective = start(tensors), backward
        result = ctx.handle.wait()
        if isinstance(result, torch.Tensor):
            return result
        ctx.mark_non_differentiable(*[t for t in result if not t.is_floating_point()])
        return tuple(result)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.collective(grads, ctx.handle)
