"""Models, optimizers and whatever belongs to them, as one state to commit and to go back to."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ringlet.job.elastic import ObjectState
from ringlet.job.process_sets import InvalidArgument
from ringlet.job.topology import rank, size
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.memory import Undo, at_work
from ringlet.shared.residual_store import mapped
from ringlet.torch.elastic.hook_memory import HookMemory, memory_of, register
from ringlet.torch.elastic.roots import Roots, reducers_of
from ringlet.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringlet.torch.optimizer.reducer import Reducer
from ringlet.torch.parameters.checkpoint import STATE_KEY

_ALONE = "progress"  # the method of optimizers whose ranks do something alone


class TorchState(ObjectState):
    """A model, an optimizer and, as ``kwargs``, anything else; all of them become attributes.

    Models and optimizers travel as tensors; samplers, schedulers and the like by their
    ``state_dict``, other objects as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._hooks: dict[HookMemory, Undo] = {}  # as they were at the last commit
        self._keeps = False  # whether a step that fails is to be undone
        self._roots = Roots()
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def save(self) -> None:
        """Keep copies of all states, and among how many ranks they are."""
        super().save()
        if self._keeps:
            self.keep_steps()  # also of what was made since
        for hook in self._memories():
            with at_work():
                self._hooks.setdefault(hook, Undo()).remember(hook.memory.states)
        self._among = [holder.memory.among for holder in self.holders()]
        for holder in self.holders():
            holder.memory.reduced = 0
        if is_elastic() and self._synchronised:  # a newcomer has nothing yet
            self._roots.note_own(self._values())

    def restore(self) -> None:
        """Go back to what was saved last, by this process: under whichever rank it was then."""
        for reducer in self._reducers():
            reducer.take_back()  # else it would go back to before that step, later
        for content in self._saved.values():
            if isinstance(content, dict) and isinstance(kept := content.get(STATE_KEY), dict):
                kept.update(rank=rank(), size=size())
        for holder, among in zip(self.holders(), self._among, strict=False):
            holder.memory.among, holder.memory.reduced = among, 0
        super().restore()
        for hook in self._memories():
            if hook in self._hooks:
                hook.memory.take_back()
                with at_work():
                    self._hooks[hook].restore(hook.memory.states, counters=True)

    def holders(self) -> Sequence[Reducer | HookMemory]:
        """Return the reducers of the optimizers, and what DDP hooks remember of the models."""
        return [*self._reducers(), *self._memories()]

    def held_back(self) -> float:
        """Return the norm of what compression holds back on this rank alone."""
        return math.hypot(*[holder.memory.owed_norm() for holder in self.holders()])

    def keep_steps(self) -> None:
        """Keep what compressors remember from before each step."""
        self._keeps = True
        for holder in self.holders():
            holder.memory.keep_steps()

    def take_back(self) -> None:
        """Let compressors forget the step at hand; go back to the commit if a part of it is taken.

        Of several optimizers, or hooks, some have then had more steps since the commit than others.
        """
        used = [h.memory for h in self.holders() if h.memory.unfinished or h.memory.reduced]
        uneven = len({memory.reduced for memory in used}) > 1
        for reducer in self._reducers():
            reducer.take_back()
        for hook in self._memories():
            hook.memory.take_back()
        if uneven:  # or the optimizers that have stepped would do so twice
            self.restore()

    def content(self) -> dict[str, Any]:
        """Return all states, arrays in place of tensors, without what is each rank's own."""
        steps = [holder.step for holder in self.holders()]
        found = super().content()
        for state in found.values():
            if isinstance(state, dict):
                state.pop(STATE_KEY, None)
        return {"": steps, **mapped(found, _bits)}

    def sync(self) -> None:
        """Take over rank 0's state, and save it. Collective.

        In an elastic job, what a rank has done alone since ranks agreed last (DiLoCo) stays, and
        what a process set trains is taken over from a rank that was in it (``Roots``).
        """
        kept, roots = [], {}
        if is_elastic():
            self._refuse_lost_sets()
        for reducer in self._reducers() if is_elastic() else []:
            reducer.take_back()  # a step that was under way where another optimizer's was committed
        if self._synchronised and is_elastic():
            local = [value for name in self._names if hasattr(value := getattr(self, name), _ALONE)]
            kept = [(value, value.progress()) for value in local]
        values = self._values()
        if is_elastic():
            roots = self._roots.find(values, self._synchronised)
        for name, value in values.items():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=roots.get(name, 0))
        for name, value in values.items():
            if isinstance(value, torch.optim.Optimizer):
                root = roots.get(name, 0)
                if any(roots.values()):  # optimizers of one model may have been other ranks'
                    broadcast_parameters(_parameters(value), root_rank=root)
                broadcast_optimizer_state(value, root_rank=root)
        for value, progress in kept:
            value.resume(progress)
        for model in self._models():
            register(model)
        if is_elastic() and (reducers := self._reducers()):
            told = self._broadcast([reducer.memory.changed for reducer in reducers])
            for reducer, changed in zip(reducers, told, strict=True):
                reducer.memory.follow(changed)  # newcomers were not there when others changed
        for holder in self.holders():
            holder.join_epoch()
        if memories := self._memories():
            told = self._broadcast([hook.memory.steps for hook in memories])
            for hook, steps in zip(memories, told, strict=True):
                hook.memory.align(steps)
        if is_elastic():
            self._forget_gradients()
        super().sync()
        if is_elastic():
            self._roots.note_all(values)

    def forget_held(self) -> bool:
        """Forget what compressors remember, of optimizers and of hooks."""
        held = [holder.memory.forget() for holder in self.holders()]
        return any(held)

    def _let_ranks_change(self) -> NoReturn:
        self._roots.note_own(self._values())  # nobody goes back: steps since the commit count
        super()._let_ranks_change()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _copied(self, content: Any, room: Any) -> Any:
        return _copied(content, room) if isinstance(content, dict) else copy.deepcopy(content)

    def _reducers(self) -> list[Reducer]:
        return list(reducers_of(self._values()).values())

    def _memories(self) -> list[HookMemory]:
        """Return what DDP hooks remember of the models, if they are ever used."""
        return [memory_of(model) for model in self._models()]

    def _models(self) -> list[torch.nn.Module]:
        """Return the models whose hooks' memory outlives the hooks: in an elastic job, all."""
        values = [getattr(self, name) for name in self._names] if is_elastic() else []
        return [value for value in values if isinstance(value, torch.nn.Module)]

    def _refuse_lost_sets(self) -> None:
        """Raise InvalidArgument for a process set that was not added again.

        Before anything is sent: a rank that finds out later, or never, would wait for newcomers
        that wait for it to add the set.
        """
        for name, reducer in reducers_of(self._values()).items():
            chosen = reducer.process_set
            if chosen.process_set_id is None:
                raise InvalidArgument(
                    f"state.{name} reduces over the process set of ranks {chosen.ranks}, which is "
                    "gone, as all sets are when ranks change; add the same object again, before "
                    "elastic.run and in a callback: state.register_reset_callbacks([lambda: "
                    "hvd.add_process_set(pair)])"
                )

    def _forget_gradients(self) -> None:
        """Clear gradients: some are sums already, others are not, and backward adds to them."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.optim.Optimizer):
                value.zero_grad()

    def _plain(self) -> list[str]:
        tensors = torch.nn.Module, torch.optim.Optimizer
        return [name for name in self._names if not isinstance(getattr(self, name), tensors)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copied(value: Any, room: Any) -> Any:
    """Return a copy of a state, whose tensors lie where the last one's did if they fit there.

    New memory takes longer than the copying.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided:
        if (
            type(room) is not torch.Tensor
            or (room.shape, room.dtype, room.device) != (value.shape, value.dtype, value.device)
            or room.data_ptr() == value.data_ptr()
        ):
            return value.detach().clone()
        return room.copy_(value.detach())
    if isinstance(value, dict):
        rooms = room if isinstance(room, dict) else {}
        made = copy.copy(value)  # with what torch hangs on it
        for key, inner in value.items():  # update() of a Counter, such as a scheduler's, would add
            made[key] = _copied(inner, rooms.get(key))
        return made
    return copy.deepcopy(value)


def _bits(value: Any) -> Any:
    """Return a tensor as an array of the same bits; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    flat = value.detach().cpu().contiguous().reshape(-1)
    return [str(value.dtype), list(value.shape), flat.view(torch.uint8).numpy()]
