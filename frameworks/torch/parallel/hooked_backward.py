"""The backward pass of a model that DistributedDataParallel reduces through a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ringlet.torch.elastic.epoch_group import behind_backward
from ringlet.torch.elastic.hook_memory import NO_BACKWARD, HookMemory, reopen
from ringlet.torch.ops.entry_points import untraced


class _Untouched(NamedTuple):
    """A gradient to which DDP is to write ``mean``, and how it was before."""

    p: torch.Tensor
    mean: torch.Tensor
    grad: torch.Tensor | None
    version: int

    def deliver(self) -> None:
        """Let the gradient be the mean where DDP has not written it.

        So it does with parameters that no rank has used: what earlier steps held back, and this one
        has sent, would be lost. What was in the gradient has been sent, and is in the mean.
        """
        p, grad = self.p, self.p.grad
        if grad is not self.grad or (grad is not None and grad._version != self.version):
            return
        if not p.requires_grad or (grad is None and not bool(self.mean.any())):
            return  # what is frozen stays as it is, and a gradient of zeros is none
        mean = torch.view_as_complex(self.mean) if p.is_complex() else self.mean
        if torch.empty_like(p).stride() == p.stride():  # as DDP lays it out, such as channels_last
            mean = mean.as_strided(p.shape, p.stride())
        if grad is None:
            p.grad = torch.empty_like(p).copy_(mean)
        else:
            grad.copy_(mean)


class HookedBackward:
    """Raises what has failed in a pass, at its end, and delivers what DDP has left out.

    Of a future's error DDP makes a text without its class, and can not go on afterwards; nor where
    a hook raises. So it gets its buckets, and the error is raised behind whatever DDP does in the
    end.
    """

    def __init__(self) -> None:
        self._untouched: list[_Untouched] = []
        self._failure: Exception | None = None
        self._task = NO_BACKWARD  # torch's number of the pass whose end is waited for
        self._memories: dict[HookMemory, None] = {}  # in an elastic job: what outlives the hook

    def enlist(self, memory: HookMemory) -> None:
        """Tell ``memory``, from the pass at hand on, when passes begin and have ended well."""
        if memory not in self._memories:
            self._memories[memory] = None
            memory.began(self._task)

    def watch(self, then: Callable[[], None]) -> bool:
        """Let the pass at hand ``end``, and ``then`` follow; False where none is under way."""
        task = torch._C._current_graph_task_id()
        if task == NO_BACKWARD:
            self._task = task
            return False
        if task != self._task:
            self._task, self._untouched = task, []

            @untraced
            def end() -> None:
                self.end()
                then()

            behind_backward(end)
            for memory in self._memories:
                memory.began(self._task)
        return True

    def expect(self, p: torch.Tensor, mean: torch.Tensor) -> None:
        """Note how the gradient of ``p`` is before DDP writes ``mean`` to it."""
        grad = p.grad
        if grad is None or grad.data_ptr() != mean.data_ptr():
            self._untouched.append(_Untouched(p, mean, grad, 0 if grad is None else grad._version))

    def failed(self, error: Exception) -> None:
        """Note what the pass at hand is to raise."""
        self._failure = self._failure or error

    @untraced
    def end(self) -> None:
        """Raise what was noted, if anything was; else deliver what DDP has not."""
        failure, self._failure = self._failure, None
        untouched, self._untouched = self._untouched, []
        if failure is not None:
            reopen(self._task)
            raise failure
        for memory in self._memories:
            memory.ended()
        with torch.no_grad():
            for each in untouched:
                each.deliver()
