"""What DDP hooks remember in an elastic job: it outlives the hook, which is of one epoch only.

DistributedDataParallel is made anew when ranks change, and a hook with it. What its compressors
held back belongs to the parameters of the bare model, so a ``TorchState`` keeps it for these.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.states import carry_over
from ringlet.job.process_sets import global_process_set
from ringlet.job.session import current
from ringlet.shared.memory import Memory

NO_BACKWARD = -1  # torch's number of the backward pass where there is none
_all: weakref.WeakSet[HookMemory] = weakref.WeakSet()


class HookMemory:
    """What this rank's hooks remember of a model's parameters, by name."""

    def __init__(self) -> None:
        self._compressors: dict[str, Compressor] = {}
        self.memory = Memory(self._compressors.get, averages=True)
        self.process_set = global_process_set
        self._identity = ""  # of the ranks that there were last
        self._pass = NO_BACKWARD  # torch's number of the last backward pass that has begun
        _all.add(self)

    @property
    def step(self) -> int:
        """How often the parameter was compressed that was so most often."""
        return max(self.memory.steps.values(), default=0)

    def adopt(self, name: str, compressor: Compressor) -> State:
        """Return what was remembered of a parameter, for a hook that compresses it so."""
        memory, before = self.memory, self._compressors.get(name)
        if before is not None and before != compressor:
            carry_over(memory.states[name], before, compressor, memory.among, True)
        self._compressors[name] = compressor
        return memory.adopt(name)

    def began(self, backward: int) -> None:
        """Note that a backward pass, of torch's number, begins to reduce; several hooks may."""
        before, self._pass = self._pass, backward
        self.memory.began(fresh=not before == backward != NO_BACKWARD)

    def ended(self) -> None:
        """Note that all of it is reduced."""
        self.memory.ended()

    def join_epoch(self) -> None:
        """Go on among the ranks that there are now."""
        runtime = current()
        if self._identity == runtime.identity:
            return
        self._identity = runtime.identity
        self.memory.resize(runtime.size)


def reopen(backward: int) -> None:
    """Let ``take_back`` forget a backward pass that has failed, also where a model was reduced.

    Its optimizer takes no step then, and what it was to apply is lost.
    """
    for hook in _all:
        if hook._pass == backward != NO_BACKWARD:
            hook.memory.reopen()


_by_module: weakref.WeakKeyDictionary[torch.nn.Module, HookMemory] = weakref.WeakKeyDictionary()
_by_parameter: dict[int, tuple[weakref.ref[torch.Tensor], HookMemory, str]] = {}


def memory_of(module: torch.nn.Module) -> HookMemory:
    """Return what hooks remember of the parameters of ``module``."""
    memory = _by_module.get(module)
    return register(module) if memory is None else memory


def register(module: torch.nn.Module) -> HookMemory:
    """Return ``memory_of`` the module, which from now on keeps that of all parameters it has."""
    memory = _by_module.setdefault(module, HookMemory())
    for name, p in module.named_parameters():
        known = kept_for(p)
        if known is None:
            key = id(p)
            there: weakref.ref[torch.Tensor] = weakref.ref(p, partial(_forget, key))
            _by_parameter[key] = there, memory, name
    return memory


def _forget(key: int, _: Any) -> None:
    _by_parameter.pop(key, None)


def kept_for(p: torch.Tensor) -> tuple[HookMemory, str] | None:
    """Return what keeps the memory of a parameter, and its name there; None where nothing does."""
    known = _by_parameter.get(id(p))
    return known[1:] if known is not None and known[0]() is p else None
