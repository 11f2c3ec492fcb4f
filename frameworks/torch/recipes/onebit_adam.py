"""1-bit Adam: Adam whose second moment is frozen after a while, so that momentum can be compressed.

Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
speed", ICML 2021.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.fusion.errors import StepAbandoned
from ringlet.job.session import current
from ringlet.ring.callers import outside
from ringlet.shared.compression import as_router
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import agree_on_settings
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.optimizer.lost_memory import of_distributed_checkpoint
from ringlet.torch.optimizer.reducer import Reducer
from ringlet.torch.optimizer.scaler_looks import RefusesScaler
from ringlet.torch.optimizer.step_misuse import REPEAT
from ringlet.torch.parameters.checkpoint import (
    STATE_KEY,
    check_optimizers,
    check_tensors,
    record_in,
    shards_of,
)
from ringlet.torch.parameters.frozen import refuse_strays
from ringlet.torch.parameters.naming import Named, named_pairs

_TOLD = 3  # parameters that a warning names
_LOADED = "OneBitAdam has loaded a state: ranks see whether all have one of the same step"
_SAME = (
    "warm-up ends after as many on all ranks: load on every rank what that rank saved in the same "
    "step, or call hvd.broadcast_optimizer_state(optimizer, root_rank=0) on all ranks"
)


class OneBitAdam(RefusesScaler, torch.optim.Optimizer):
    """Adam on averaged gradients for ``warmup`` steps; then on compressed averaged momentum.

    In the second phase every rank folds its own gradient into the common momentum, ranks average
    the results in ``compression`` with error feedback, and the step divides by the second moment
    of the end of the warm-up. The paper warms up for 15 to 25 % of all steps, until the second
    moment hardly changes. Reduces by itself: do not wrap it in DistributedOptimizer.

    A bit says + or -, and never 0. Where the second moment is next to nothing, that would throw
    parameters far away. So in the second phase what had no gradient in the warm-up stays as it is,
    and a warning tells how much that is. Nothing else moves further in a step than it can in Adam:
    ``lr * (1 - beta1) / sqrt(1 - beta2)``, or ``lr`` where that is more.

    ``weight_decay`` is added to gradients, as ``torch.optim.Adam``'s; with
    ``decoupled_weight_decay`` it shrinks parameters instead, as ``AdamW``'s and DeepSpeed's.

    Raises ValueError for settings out of range, and what DistributedOptimizer raises.
    """

    def __init__(
        self,
        named_parameters: Named,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        warmup: int = 100,
        compression: Spec | Routes = "onebit | ef",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if not (lr > 0 and eps > 0 and 0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"lr and eps must be > 0, betas in [0, 1); got {lr}, {eps}, {betas}")
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1 step, got {warmup}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        named = {name: p for name, p in named_pairs(named_parameters) if p.requires_grad}
        settings = {"warmup": warmup, "compression": as_router(compression)}
        agree_on_settings("OneBitAdam", settings)
        decay = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(list(named.values()), {"lr": lr, "betas": betas, "eps": eps, **decay})
        self.warmup, self.steps = warmup, 0
        self._names = {p: name for name, p in named.items()}
        self._compression: Spec | Routes = compression
        self._compressing: bool | None = False  # None where that has to be seen
        self._loaded = False  # a state of which ranks have yet to see whether all have one
        # What is reduced travels as the gradient of a stand-in: a gradient first, momentum later.
        self._carriers = {n: torch.nn.Parameter(torch.zeros_like(p)) for n, p in named.items()}
        uncompressed = Options(compression="none")
        self._reducer = Reducer(self._carriers, uncompressed, title="OneBitAdam", compared=named)
        self._reducer.at_hand.awaits_backward = False  # which knows no carriers

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; with a ``closure``, evaluate it once before."""
        if of_distributed_checkpoint(sys._getframe(1)):  # with zeros, for the state to be there
            for _, p in self._each():
                self._moments(p)["step"] = self.steps
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        cure = "make a new OneBitAdam of all parameters, on all ranks"
        try:
            refuse_strays(self.param_groups, self._names, "OneBitAdam", cure)
            self._refuse_sparse()
        except RuntimeError as error:
            raise self._reducer.at_hand.give_up_because(error) from None
        while not self._reduced():  # another rank has loaded a state, and so on
            self._compare()
        if self.steps == self.warmup:
            self._warn_of_what_stays()
        with torch.no_grad():
            self.steps += 1  # not before: ranks count those that none of them has given up
            for group, p in self._each():
                self._update(group, p, self._carriers[self._names[p]].grad)
        return loss

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; RuntimeError after a step that was interrupted."""
        self._reducer.at_hand.refuse_in_flight("zero_grad()", REPEAT)
        super().zero_grad(set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded state, which may be of before there was weight decay."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("weight_decay", 0.0)
            group.setdefault("decoupled_weight_decay", False)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "OneBitAdam cannot be copied or pickled: it is tied to this process's parameters and "
            "peers. Copy or save optimizer.state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state with its step, and this rank's residuals under one more key.

        Save it on every rank, as DistributedOptimizer's.
        """
        state = super().state_dict()
        kept = self._reducer.memory.saved(self._reducer.step)
        if kept is not None:
            state[STATE_KEY] = kept
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what this rank saved. Warns, and starts without residuals, if it did not."""
        self._reducer.at_hand.refuse_in_flight("load_state_dict")
        kept = record_in(state_dict)  # before anything is loaded
        self._load_inner(state_dict)
        self._reducer.memory.change(as_router(self._chosen()))
        self._reducer.load(kept)

    def load_sharded(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Load what all ranks of an earlier job saved, as DistributedOptimizer does."""
        self._reducer.at_hand.refuse_in_flight("load_sharded")
        own, shards = shards_of(state_dicts, current().rank)
        self._load_inner(own)
        self._reducer.memory.change(as_router(self._chosen()))
        self._reducer.load_shards(shards)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._reducer.memory.norm()

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:  # as DistributedOptimizer's
        return self._names

    @property
    def _ringlet(self) -> Reducer:
        return self._reducer

    def _load_inner(self, state_dict: Mapping[str, Any]) -> None:
        """Load all but residuals. Raises ValueError, and loads nothing, without Adam's steps."""
        check_optimizers(state_dict)
        moments = state_dict["state"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        check_tensors(moments, parameters, "state_dict")
        if not all("step" in state for state in moments.values()):
            raise ValueError(
                "this checkpoint of OneBitAdam does not say after how many steps it was saved (it "
                "is of an older release): set state['step'] of every parameter in it, and load it"
            )
        steps = [_steps(key, state["step"]) for key, state in moments.items()]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != STATE_KEY})
        self.steps = max(steps, default=0)
        self._loaded, self._compressing = True, None  # what is declared may be another's by now

    @torch.no_grad()
    def _reduced(self) -> bool:
        """Reduce gradients or momentum; False where a rank has loaded a state, and asks for others.

        Then the step was given up, and is to be taken once ranks have compared their states.
        """
        if self._loaded and not self._reducer.at_hand.in_flight:
            self._reducer.give_way(_LOADED)
            return False
        self._switch()
        # Where the last call was interrupted, what it has handed in is waited for again.
        for group, p in [] if self._reducer.at_hand.in_flight else self._each():
            carrier = self._carriers[self._names[p]]
            still = p.grad is None and not p.requires_grad  # frozen: Adam passes it over
            carrier.requires_grad_(not still)  # ranks compare what is frozen
            if still:
                carrier.grad = None
                continue
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                gradient = gradient.add(p, alpha=group["weight_decay"])
            if self._compressing:
                momentum = self._moments(p)["exp_avg"]
                gradient = momentum.lerp(gradient, 1 - group["betas"][0])
            carrier.grad = gradient.clone()
        try:
            self._reducer.synchronize([], self.param_groups)
        except StepAbandoned as error:
            if _LOADED not in str(error):
                raise
            return False
        return True

    def _refuse_sparse(self) -> None:
        """Raise RuntimeError where there is a sparse gradient, as Adam does: momentum is dense."""
        for p, name in self._names.items():
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(
                    f"OneBitAdam: the gradient of {name!r} is sparse, and Adam's moments are not: "
                    "make its embedding with sparse=False"
                )

    def _compare(self) -> None:
        """Raise Mismatch, on all ranks, unless all have taken as many steps. Collective."""
        self._reducer.compare("state of OneBitAdam", [("steps taken", str(self.steps))], _SAME)
        self._loaded = False

    def _switch(self) -> None:
        """Compress, or stop it, as the number of steps says, which a checkpoint may have changed.

        Here, where all ranks come by, and not where one of them may load on its own. In an elastic
        job, newcomers and who goes back have declared it by then.
        """
        if self._compressing != (self.steps >= self.warmup):
            self._compressing = self.steps >= self.warmup
            if not self._reducer.declares(self._chosen()):
                self._reducer.set_compression(self._chosen())

    def _warn_of_what_stays(self) -> None:
        """Warn of elements whose gradient was 0 in all of the warm-up."""
        stay = {
            name: int((self._moments(p)["exp_avg_sq"] == 0).sum())
            for p, name in self._names.items()
            if p.requires_grad
        }
        told = [
            f"{count} of {self._carriers[name].numel()} elements of {name!r}"
            for name, count in stay.items()
            if count
        ]
        if not told:
            return
        if len(told) > _TOLD:
            told[_TOLD:] = [f"some of {len(told) - _TOLD} more parameters"]
        warnings.warn(
            f"OneBitAdam: {', '.join(told)} had no gradient in the {self.warmup} steps of the "
            "warm-up. Their second moment is 0, so they stay as they are from now on. If they are "
            "to be trained, warm up for longer",
            stacklevel=outside(),
        )

    def _chosen(self) -> Spec | Routes:
        """Return how what is reduced is compressed in the next step."""
        return self._compression if self.steps >= self.warmup else "none"

    def _each(self) -> list[tuple[dict[str, Any], torch.nn.Parameter]]:
        groups = self.param_groups
        return [(group, p) for group in groups for p in group["params"] if p in self._names]

    def _moments(self, p: torch.Tensor) -> dict[str, Any]:
        """Return the state of ``p``, with moments of zeros if it has none."""
        state: dict[str, Any] = self.state[p]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state

    def _update(self, group: dict[str, Any], p: torch.Tensor, reduced: torch.Tensor | None) -> None:
        state, (beta1, beta2) = self._moments(p), group["betas"]
        state["step"] = self.steps
        if reduced is None:
            return
        if self._compressing:
            state["exp_avg"].copy_(reduced * (state["exp_avg_sq"] > 0))
        else:
            state["exp_avg"].lerp_(reduced, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(reduced, reduced, value=1 - beta2)
        # The corrections of Adam for its start; the second one stops where the moment is frozen.
        first = 1 - beta1**self.steps
        second = 1 - beta2 ** min(self.steps, self.warmup)
        if group["decoupled_weight_decay"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        divisor = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        if not self._compressing:
            p.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / first)
            return
        most = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
        p.add_((state["exp_avg"] / divisor / first).clamp_(-most, most), alpha=-group["lr"])


def _steps(key: object, saved: Any) -> int:
    """Return the number of steps that is ``saved`` of a parameter; ValueError for anything else."""
    try:
        steps = int(saved)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        steps = -1
    if not 0 <= steps < 1 << 62:
        raise ValueError(
            f"state_dict['state'][{key!r}]['step'] is no number of steps: load another checkpoint"
        )
    return steps
