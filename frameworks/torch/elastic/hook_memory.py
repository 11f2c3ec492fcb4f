"""What DDP hooks remember in an elastic job: it outlives the hook, which is of one epoch only.

DistributedDataParallel is made anew when ranks change, and a hook with it. What its compressors
held back belongs to the parameters of the bare model, so a ``TorchState`` keeps it for these.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.states import carry_over, owed, resize, take_over
from ringlet.job.session import current
from ringlet.shared.residual_store import norm
from ringlet.shared.rollback import Undo
from ringlet.torch.optimizer.reducer import at_work

NO_BACKWARD = -1  # torch's number of the backward pass where there is none
_all: weakref.WeakSet[HookMemory] = weakref.WeakSet()


class HookMemory:
    """What this rank's hooks remember of a model's parameters, by name; see ``Reducer``.

    ``among`` is the number of ranks whose gradients were averaged last. With ``owes``, what is owed
    to a mean stays that where ranks come or go.
    """

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.among, self.owes = 0, False
        self._compressors: dict[str, Compressor] = {}
        self._given: dict[str, list[tuple[Mapping[str, Any], int]]] = {}  # before any hook
        self._identity = ""  # of the ranks that there were last
        self._undo: Undo | None = None
        self._unfinished = False  # whether a backward pass has begun, and was not reduced
        self._pass = NO_BACKWARD  # torch's number of the last one that has begun
        _all.add(self)

    @property
    def step(self) -> int:
        """How often the parameter was compressed that was so most often."""
        return max(self.steps.values(), default=0)

    @property
    def steps(self) -> dict[str, int]:
        """How often each parameter's gradient was compressed."""
        return {n: int(state["step"]) for n, state in self.states.items() if "step" in state}

    def align(self, steps: Mapping[str, int]) -> None:
        """Count as another rank does: shared random numbers and schedules depend on it."""
        for name, step in steps.items():
            self.states.setdefault(name, {})["step"] = step

    def adopt(self, name: str, compressor: Compressor) -> State:
        """Return what was remembered of a parameter, for a hook that compresses it so."""
        state, before = self.states.setdefault(name, {}), self._compressors.get(name)
        if before is not None and before != compressor:
            carry_over(state, before, compressor, self.among, True)
        self._compressors[name] = compressor
        for given, among in self._given.pop(name, ()):
            take_over(state, compressor, given, among, self.among, True)
        return state

    def began(self, backward: int) -> None:
        """Note that a backward pass, of torch's number, begins to reduce; several hooks may."""
        before, self._pass, self._unfinished = self._pass, backward, True
        if self._undo is not None and not before == backward != NO_BACKWARD:
            with at_work():
                self._undo.remember(self.states)

    def ended(self) -> None:
        """Note that all of it is reduced."""
        self._unfinished = False

    def keep_steps(self) -> None:
        """From now on copy what is remembered before each backward pass, for ``take_back``."""
        self._undo = self._undo or Undo()

    def take_back(self) -> None:
        """Forget the backward pass at hand, which has failed."""
        if self._unfinished and self._undo is not None:
            with at_work():
                self._undo.restore(self.states, counters=True)
        self._unfinished = False

    def join_epoch(self) -> None:
        """Go on among the ranks that there are now."""
        runtime = current()
        if self._identity == runtime.identity:
            return
        self._identity, before, self.among = runtime.identity, self.among, runtime.size
        if before:
            with at_work():
                for name, compressor in self._compressors.items():
                    resize(self.states[name], compressor, before, self.among, True, self.owes)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what is held back on this rank."""
        with at_work():
            return norm(self.states)

    def own(self) -> dict[str, State]:
        """Return what is held back on this rank alone, by parameter."""
        with at_work():
            held = {name: owed(self.states[name], c) for name, c in self._compressors.items()}
        return {name: state for name, state in held.items() if state}

    def take_over(self, given: Mapping[str, Mapping[str, Any]], among: int) -> None:
        """Add what was another rank's ``own``, of so many, to what is this one's."""
        with at_work():
            for name, state in given.items():
                if name in self._compressors:
                    mine, compressor = self.states[name], self._compressors[name]
                    take_over(mine, compressor, state, among, self.among, True)
                else:  # this rank came after the last hook was made
                    self._given.setdefault(name, []).append((state, among))


def reopen(backward: int) -> None:
    """Let ``take_back`` forget a backward pass that has failed, also where a model was reduced.

    Its optimizer takes no step then, and what it was to apply is lost.
    """
    for memory in _all:
        if memory._pass == backward != NO_BACKWARD:
            memory._unfinished = True


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
