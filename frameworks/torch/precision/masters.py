"""What a policy adds to an optimizer: float32 masters, and a loss scale that ranks share.

    model = hvd.apply_precision(model, "fp16")
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), precision="fp16")
    optimizer.scale(loss).backward()
    optimizer.step()

Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.precision import LossScale, Policy
from ringlet.ring.callers import outside
from ringlet.shared.memory import Memory
from ringlet.torch.precision.visible_gradients import Shown

PRECISION_KEY = "ringlet_precision"  # masters and loss scale in an optimizer's state_dict
_CURE = "the checkpoint is damaged, or of something else; load another one"


class Results(Protocol):
    """What masters ask about the reduced gradients of a step."""

    @property
    def finite(self) -> bool:
        """Whether all that is ``unscaled`` is finite."""

    def deliver(self, results: Mapping[str, torch.Tensor], cure: str) -> None:
        """Let results go to ``results``, by name; ``cure`` is for gradients changed before."""

    def delivered(self, name: str) -> torch.Tensor | None:
        """Return where the last result was delivered to; None if it is in the gradient."""

    def unscaled(self, name: str) -> bool:
        """Whether the last result is divided by the loss scale, and was looked at, already."""


class Reductions(Protocol):
    """What masters ask of the reducer that reduces the gradients of a model's parameters."""

    parameters: dict[str, torch.nn.Parameter]

    @property
    def memory(self) -> Memory:
        """What compressors remember."""

    @property
    def gradients(self) -> Results:
        """The gradients of a step, and where results go."""

    def undo(self) -> None:
        """Forget what the last step, which is skipped, has changed in what is remembered."""


class Masters:
    """Float32 copies of an optimizer's 16-bit parameters, if it has any, and the loss scale.

    Replaces the parameters in the optimizer's groups by their copies, but for those of ``before``,
    which are there since the optimizer was wrapped last, and stay. So do the loss scale and the
    count of skipped steps under the same policy. ``unscaling`` is told of the loss scale.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: dict[str, torch.nn.Parameter],
        policy: Policy,
        unscaling: Unscaling | None,
        before: Masters | None = None,
    ) -> None:
        self.policy = policy
        self.scale, self.skipped = going_on(policy, before)
        self.overflow = False  # of the step that was reduced last
        self.asked = False  # whether anybody has wanted to know the scale
        self._unscaling = unscaling
        name_of = {id(p): name for name, p in named.items()}
        self.pairs: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        self._model_of: dict[int, torch.nn.Parameter] = {}  # by the ids of masters
        self._wide: list[tuple[str, torch.nn.Parameter]] = []
        self._versions: dict[str, int] = {}  # of the parameters, as this left them
        self._shown = Shown(self.scale.watches)
        known = {} if before is None else before._model_of
        for g, group in enumerate(optimizer.param_groups):
            for i, held in enumerate(group["params"]):
                p = known.get(id(held), held)
                if p.dtype in (torch.float16, torch.bfloat16):
                    master = torch.nn.Parameter(p.detach().float()) if held is p else held
                    self.pairs[name_of.get(id(p), f"frozen.{g}.{i}")] = p, master
                    self._model_of[id(master)] = p
                    group["params"][i] = master
                    if p in optimizer.state:
                        optimizer.state[master] = _widened(optimizer.state.pop(p), p.dtype)
                else:
                    self._wide.append((name_of.get(id(p), ""), p))

    def deliver_to(self, reducer: Reductions) -> None:
        """Let ``reducer`` write what it reduces of 16-bit parameters to their masters' gradients.

        Sums are not rounded to 16 bits for that, and the loss scale is off before a bucket is done.
        """
        named = {name: master for name, (_, master) in self.pairs.items()}
        results = {
            name: torch.empty(master.shape, dtype=torch.float32)
            for name, master in named.items()
            if name in reducer.parameters
        }
        cure = "clip optimizer.master_parameters() after synchronize()"
        reducer.gradients.deliver(results, cure)

    def of_model(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter ``groups`` of the optimizer with the model's own in masters' places."""
        own = self._model_of
        return [
            group | {"params": [own.get(id(p), p) for p in group["params"]]} for group in groups
        ]

    def take_gradients(self, results: Results) -> None:
        """Hand the reduced gradients to the masters, unscaled, and see if one ``overflow``ed.

        Reduced gradients are the same bits on every rank, and so is what is found. Raises
        RuntimeError where backward has added to gradients that were shown under a loss scale.
        """
        self._shown.refuse_mixtures()
        self._follow()
        for name, (p, master) in self.pairs.items():
            frozen = p.grad is None and not p.requires_grad
            master.grad = None if frozen else results.delivered(name)
            if master.grad is None and p.grad is not None:
                master.grad = p.grad.detach().float()
        if self.scale.watches:
            stepping = [*((n, m) for n, (_, m) in self.pairs.items()), *self._wide]
            left = [p for n, p in stepping if p.grad is not None and not results.unscaled(n)]
            for p in left:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.coalesce()  # whose values can be changed in place
            grads = [p.grad for p in left if p.grad is not None]
            self.overflow = _unscale(grads, 1.0 / self.scale.scale) or not results.finite

    def show_gradients(self) -> None:
        """Copy the masters' gradients to where a caller of ``synchronize`` looks for them."""
        self._shown.show(self.pairs, self._wide)

    def see_changes(self) -> None:
        """Take over what the caller has changed since ``synchronize``: gradients, and parameters.

        RuntimeError for shown gradients that must not be changed.
        """
        self._shown.see_changes(self.pairs)
        self._follow()

    def warn_unless_scaled(self) -> None:
        """Warn where nobody has asked for a loss scale: then no loss was multiplied by it."""
        if self.asked or self.scale.scale == 1.0:
            return
        self.asked = True  # once is enough
        warnings.warn(
            "backward() was called without optimizer.scale(loss): gradients are divided by the "
            f"loss scale {self.scale.scale:g} all the same. Call optimizer.scale(loss).backward()",
            stacklevel=outside(),
        )

    def zero_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients of the model's 16-bit parameters, and forget what was shown."""
        self._shown.forget()
        for p, _ in self.pairs.values():
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.detach_().zero_()

    def put_parameters(self) -> None:
        """Copy the masters into the model."""
        with torch.no_grad():
            for name, (p, master) in self.pairs.items():
                p.copy_(master)
                master.grad = None
                self._versions[name] = p._version

    def _follow(self) -> None:
        """Take over what others wrote into the model: before the first step, or by torch since.

        Such as ``broadcast_parameters`` and ``load_state_dict``, which know of no masters.
        """
        with torch.no_grad():
            for name, (p, master) in self.pairs.items():
                if p._version != self._versions.get(name):
                    master.copy_(torch.where(p == master.to(p.dtype), master, p.float()))
                    self._versions[name] = p._version

    def advance(self, reducer: Reductions) -> None:
        """Move the loss scale on; residuals, which are in its units, follow.

        What a skipped step changed in them is taken back.
        """
        overflow, self.overflow = self.overflow, False
        if overflow:
            reducer.undo()
        before, self.scale = self.scale.scale, self.scale.after(overflow)
        self.skipped += overflow
        if self.scale.scale != before:
            reducer.memory.rescale(self.scale.scale / before)
        self._tell()

    def _tell(self) -> None:
        if self._unscaling is not None:
            self._unscaling.scale = self.scale.scale

    def state_dict(self) -> dict[str, Any]:
        """Return masters and scale, for a checkpoint."""
        masters = {name: master.detach() for name, (_, master) in self.pairs.items()}
        return {"masters": masters, "scale": self.scale.state_dict(), "skipped": self.skipped}

    def check(self, state: Any) -> None:
        """Raise ValueError unless ``state`` is what ``state_dict`` gave, of the masters here.

        A policy without masters saves none.
        """
        place = f"state_dict[{PRECISION_KEY!r}]"
        _loss_scale(state)
        saved, skipped = state.get("masters"), state.get("skipped")
        if type(skipped) is not int or skipped < 0:
            raise ValueError(f"{place}['skipped'] is no number of steps: {_CURE}")
        if not isinstance(saved, Mapping):
            raise ValueError(f"{place}['masters'] is a {type(saved).__name__}, not a dict: {_CURE}")
        if saved and saved.keys() != self.pairs.keys():
            odd = sorted(map(str, saved.keys() ^ self.pairs.keys()))
            reason = "" if self.pairs else "; this policy has none, load with the one that saved"
            raise ValueError(
                f"the checkpoint's master weights are of other parameters: {odd[:3]}{reason}"
            )
        for name, master in saved.items():
            wanted = self.pairs[name][1].shape
            if not (isinstance(master, torch.Tensor) and master.dtype is torch.float32):
                raise ValueError(f"{place}['masters'][{name!r}] is no float32 tensor: {_CURE}")
            if master.shape != wanted or master.is_meta or master.layout is not torch.strided:
                raise ValueError(
                    f"{place}['masters'][{name!r}] is of shape {list(master.shape)}, the parameter "
                    f"of {list(wanted)}: {_CURE}"
                )
        try:
            self.scale.loaded(state["scale"])
        except Exception as error:  # a file may hold anything
            raise ValueError(f"{place}['scale'] is no loss scale ({error}): {_CURE}") from None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Overwrite masters, model and scale with a ``state`` that fits: see ``check``.

        Where a policy without masters has saved, masters follow what is loaded into the model.
        """
        saved = state["masters"]
        self.scale = self.scale.loaded(state["scale"])
        self.skipped = int(state["skipped"])
        self._tell()
        if saved:
            with torch.no_grad():
                for name, (_, master) in self.pairs.items():
                    master.copy_(saved[name])
            self.put_parameters()


def going_on(policy: Policy, before: Masters | None) -> tuple[LossScale, int]:
    """Return the loss scale that an optimizer begins with, and how many steps it has skipped.

    They are those of ``before``, what it had when it was wrapped last, if the policy is the same.
    """
    if before is None or before.policy != policy:
        return policy.scale, 0
    return before.scale, before.skipped


def _widened(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return what an optimizer remembers of a parameter, in float32 where it was ``dtype``."""
    return {
        key: value.float() if isinstance(value, torch.Tensor) and value.dtype is dtype else value
        for key, value in state.items()
    }


def scale_in(state: Mapping[str, Any]) -> float:
    """Return the loss scale in an optimizer's ``state_dict``; 1 if there is none.

    Raises ValueError where what is there is no loss scale.
    """
    return _loss_scale(state[PRECISION_KEY]) if PRECISION_KEY in state else 1.0


def _loss_scale(state: Any) -> float:
    """Return the loss scale in what ``Masters.state_dict`` gave; ValueError for anything else."""
    scale = state.get("scale") if isinstance(state, Mapping) else None
    found = scale.get("scale") if isinstance(scale, Mapping) else None
    if not isinstance(found, int | float) or not 0 < found <= sys.float_info.max:
        raise ValueError(f"state_dict[{PRECISION_KEY!r}] holds no loss scale: {_CURE}")
    return float(found)


def _unscale(grads: list[torch.Tensor], factor: float) -> bool:
    """Multiply ``grads`` in place; return whether one is not finite, for which a GPU is waited."""
    overflow = False
    for device, kind in {(g.device, g.dtype) for g in grads}:
        same = [
            g.coalesce().values() if g.is_sparse else g
            for g in grads
            if (g.device, g.dtype) == (device, kind)
        ]
        found, by = torch.zeros(1, device=device), torch.full((1,), factor, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, by)
        overflow = overflow or bool(found.item())
    return overflow
