"""DiLoCo: many local steps, then one outer step on the compressed average of what they changed.

Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.session import current
from ringlet.ring.errors import RingError
from ringlet.shared.model_agreement import agree_on_settings
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.optimizer.lost_memory import of_distributed_checkpoint
from ringlet.torch.optimizer.optimizer_checks import check_is_optimizer, refuse_partitioned
from ringlet.torch.optimizer.reducer import Reducer
from ringlet.torch.optimizer.scaler_looks import RefusesScaler
from ringlet.torch.optimizer.step_misuse import REPEAT
from ringlet.torch.optimizer.wrapper import DistributedOptimizer
from ringlet.torch.parameters.checkpoint import (
    STATE_KEY,
    check_optimizers,
    check_tensors,
    record_in,
    shards_of,
)
from ringlet.torch.parameters.frozen import refuse_strays
from ringlet.torch.parameters.naming import Named, name_parameters

_KEY = "ringlet_diloco"  # in a state_dict, beside the inner optimizer's state


class DiLoCo(RefusesScaler, torch.optim.Optimizer):
    """Steps ``inner`` on each rank alone; every ``every`` steps ranks agree again.

    The outer step averages (last agreed - own) parameters over ranks. It takes that for a gradient,
    and applies SGD with Nesterov momentum to the last agreed parameters. With ``outer_lr=1`` and
    ``outer_momentum=0`` this is local SGD: plain averaging.

    Ranks must begin with the same parameters (``broadcast_parameters``), and take the same number
    of steps. It is collective when it is made, and every ``every`` steps. If an outer step fails,
    ranks go on alone, and the next outer step includes what all have moved. It keeps one more copy
    of the parameters, and two of residuals.

    It shows the parameter groups and the state of ``inner``. Schedulers take it or ``inner``, and
    set the inner rate. The outer groups are those of ``outer``.

    Raises TypeError where ``inner`` is no optimizer, ValueError for settings out of range, and what
    DistributedOptimizer raises.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named_parameters: Named,
        every: int = 16,
        compression: Spec | Routes = "int8 | ef",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        if not (outer_lr > 0 and 0 <= outer_momentum < 1):
            raise ValueError(
                f"outer_lr must be > 0 and outer_momentum in [0, 1), got {outer_lr}, "
                f"{outer_momentum}"
            )
        check_is_optimizer(inner)
        if getattr(inner, "_ringlet_original", None) is not None:
            raise ValueError(
                "inner is a DistributedOptimizer, which reduces gradients in every step: pass the "
                "original optimizer, which steps on each rank alone"
            )
        refuse_partitioned(inner, "DiLoCo's inner steps are whole; pass the optimizer inside it")
        agree_on_settings("DiLoCo", {"every": every})
        self.inner, self.every, self.steps = inner, every, 0
        # Groups and state are the inner optimizer's: there is nothing to set up but torch's hooks.
        super().__setstate__({"defaults": inner.defaults})
        self._parameters = name_parameters(inner.param_groups, named_parameters)
        self._known = frozenset(self._parameters.values())
        self._agreed = {
            n: torch.nn.Parameter(p.detach().clone()) for n, p in self._parameters.items()
        }
        outer = torch.optim.SGD(
            self._agreed.values(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )
        self._moving = set(self._parameters)  # since the last outer step; the others are frozen
        self.outer: Any = DistributedOptimizer(outer, self._agreed.items(), compression)
        # Nothing may move before the first outer step.
        self._ringlet.at_hand.awaits_backward = False
        self._ringlet.memory.keep_steps()

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by parameter."""
        return self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise RuntimeError: ranks have agreed on the parameters."""
        raise RuntimeError("DiLoCo's parameters are settled when it is made: make a new one")

    @untraced
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; RuntimeError after an outer step that was interrupted."""
        self._ringlet.at_hand.refuse_in_flight("zero_grad()", REPEAT)
        self.inner.zero_grad(*args, **kwargs)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an inner step, and every ``every``-th time an outer one; return whether it did.

        With a ``closure``, return its loss, as torch's optimizers do. After an outer step that was
        interrupted, such as by a KeyboardInterrupt, take that one alone.
        """
        if of_distributed_checkpoint(sys._getframe(1)):
            return self.inner.step()  # of zeros, which is no step of the job's
        if self._ringlet.at_hand.in_flight:
            self._finish()
            return True if closure is None else None
        if not self.steps:  # somebody may have broadcast the parameters since this was made
            with torch.no_grad():
                for name, p in self._parameters.items():
                    self._agreed[name].copy_(p)
        if closure is None:
            self._refuse_strays()
            loss = self.inner.step()
        else:
            loss = self.inner.step(closure)
            self._refuse_strays()
        self._moving |= {
            name for name, p in self._parameters.items() if p.requires_grad or p.grad is not None
        }
        self.steps += 1
        outer = self.steps % self.every == 0
        if outer:
            self._agree()
        return outer if closure is None else loss

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:  # as DistributedOptimizer's
        return {p: name for name, p in self._parameters.items()}

    def _refuse_strays(self) -> None:
        cure = "make a new DiLoCo of all parameters, on all ranks"
        refuse_strays(self.inner.param_groups, self._known, "DiLoCo", cure)

    def _shown_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "DiLoCo cannot be copied or pickled: it is tied to this process's parameters and "
            "peers. Copy or save optimizer.state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, and beside it what outer steps need.

        That is the number of steps, the last agreed parameters, the outer momentum and this rank's
        residuals. Inner states differ between ranks: save it on every rank.
        """
        state = self.inner.state_dict()
        outer = self.outer.state_dict()
        if STATE_KEY in outer:
            state[STATE_KEY] = outer.pop(STATE_KEY)
        agreed = {name: p.detach() for name, p in self._agreed.items()}
        moving = sorted(self._moving)
        state[_KEY] = {"steps": self.steps, "agreed": agreed, "outer": outer, "moving": moving}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what this rank saved, as DistributedOptimizer does."""
        self._ringlet.at_hand.refuse_in_flight("load_state_dict")
        kept = record_in(state_dict)  # before anything is loaded
        self._load_inner(state_dict)
        self._ringlet.load(kept)

    def progress(self) -> dict[str, Any]:
        """Return a copy of what this rank did alone, and of what ranks had agreed on before."""
        return {
            "steps": self.steps,
            "agreed": {name: p.detach().clone() for name, p in self._agreed.items()},
            "parameters": {name: p.detach().clone() for name, p in self._parameters.items()},
            "inner": copy.deepcopy(self.inner.state_dict()),
        }

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on with this rank's ``progress``, unless ranks now agree on something else."""
        agreed = progress["agreed"]
        if self.steps != progress["steps"] or any(
            not torch.equal(p, agreed[name]) for name, p in self._agreed.items()
        ):
            return
        self.inner.load_state_dict(progress["inner"])
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(progress["parameters"][name])

    def load_sharded(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Load what all ranks of an earlier job saved, as DistributedOptimizer does."""
        self._ringlet.at_hand.refuse_in_flight("load_sharded")
        own, shards = shards_of(state_dicts, current().rank)
        self._load_inner(own)
        self._ringlet.load_shards(shards)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what outer steps' compression holds back on this rank."""
        return self._ringlet.memory.norm()

    @property
    def _ringlet(self) -> Reducer:
        reducer: Reducer = self.outer._ringlet
        return reducer

    def _load_inner(self, state_dict: Mapping[str, Any]) -> None:
        """Load all but residuals."""
        given = {key: value for key, value in state_dict.items() if key != STATE_KEY}
        own = given.pop(_KEY, None)
        self._check(own)
        before = self.inner.state_dict()
        self.inner.load_state_dict(given)
        try:
            self.outer._load_inner(dict(own["outer"]))
        except Exception:
            self.inner.load_state_dict(before)
            raise
        self.steps = int(own["steps"])
        self._moving = self._parameters.keys() & own.get("moving", self._parameters)
        with torch.no_grad():
            for name, p in self._agreed.items():
                p.copy_(own["agreed"][name])

    def _check(self, own: Any) -> None:
        """Raise ValueError unless ``own`` is what this saves beside the inner optimizer's state."""
        agreed = own.get("agreed") if isinstance(own, Mapping) else None
        if not isinstance(agreed, Mapping) or agreed.keys() != self._agreed.keys():
            raise ValueError("this state was not saved by a DiLoCo with the same parameters")
        for name, p in self._agreed.items():
            saved = agreed[name]
            if not isinstance(saved, torch.Tensor) or saved.shape != p.shape or saved.is_meta:
                kind = list(getattr(saved, "shape", ())) or type(saved).__name__
                raise ValueError(
                    f"state_dict[{_KEY!r}]['agreed'][{name!r}] is {kind}, and the parameter of "
                    f"shape {list(p.shape)}: load a checkpoint of this model"
                )
        if type(own.get("steps")) is not int or own["steps"] < 0:
            raise ValueError(f"state_dict[{_KEY!r}]['steps'] is no number of steps: load another")
        moving = own.get("moving", [])  # older files have none: all may have moved
        if not isinstance(moving, list) or not all(isinstance(name, str) for name in moving):
            raise ValueError(f"state_dict[{_KEY!r}]['moving'] is no list of names: load another")
        outer = own.get("outer")
        check_optimizers(outer)
        check_tensors(outer["state"], list(self._agreed.values()), f"state_dict[{_KEY!r}]['outer']")

    def _agree(self) -> None:
        with torch.no_grad():
            for name, p in self._parameters.items():
                last, moves = self._agreed[name], name in self._moving
                last.requires_grad_(moves)  # or outer momentum would move it
                last.grad = last.detach() - p if moves else None
        self._finish()

    def _finish(self) -> None:
        """Take the outer step, and begin with what ranks agree on."""
        try:
            self.outer.step()
        except Exception as error:
            # What moved travels again, whole: residuals must not bring a part of it once more. But
            # what is still in flight all ranks have reduced, and the next call takes that step.
            if isinstance(error, RingError) or not self._ringlet.at_hand.in_flight:
                self._ringlet.take_back()
            raise
        self._moving = set()
        with torch.no_grad():
            for name, p in self._parameters.items():
                p.copy_(self._agreed[name])
