"""Mixed precision by policy: 16-bit parameters, float32 masters, and a loss scale that ranks share.

    model = hvd.apply_precision(model, "fp16")
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), precision="fp16")
    optimizer.scale(loss).backward()
    optimizer.step()

Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from ringlet.precision import LossScale, Policy, parse_policy
from ringlet.ring.communicator import ReduceOp
from ringlet.torch.reducer import Reducer

PRECISION_KEY = "ringlet_precision"  # masters and loss scale in an optimizer's state_dict
_NORMS = (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)


def apply_precision(module: torch.nn.Module, precision: str | Policy) -> torch.nn.Module:
    """Convert ``module`` to a policy's parameter dtype, in place, and return it.

    Norm layers, and parameters that the policy keeps, stay in float32. Inputs are cast on the way
    in and outputs to float32 on the way out, so that the loss is computed in float32. Raises
    ValueError for a module that holds integer parameters or has been converted to another dtype.
    """
    policy = parse_policy(precision)
    if not policy.masters:
        return module
    dtype: torch.dtype = getattr(torch, policy.parameters)
    for name, p in module.named_parameters():
        if not p.is_floating_point():
            raise ValueError(f"policy {policy.name!r} has no use for {name!r}, which is {p.dtype}")
        if p.dtype not in (torch.float32, dtype):
            raise ValueError(
                f"parameter {name!r} is {p.dtype} already; apply {policy.name!r} to a float32 model"
            )
    for prefix, child in module.named_modules():
        kept = isinstance(child, _NORMS)
        own = dict(child.named_parameters(recurse=False))
        names = {name: f"{prefix}.{name}" if prefix else name for name in own}
        kept = kept or (bool(own) and all(policy.keeps(name) for name in names.values()))
        if kept:
            child.register_forward_pre_hook(_cast_inputs(torch.float32), with_kwargs=True)
            child.register_forward_hook(_cast_output(dtype))
            continue
        for p in own.values():
            p.data = p.data.to(dtype)
    module.register_forward_pre_hook(_cast_inputs(dtype), with_kwargs=True)
    module.register_forward_hook(_cast_output(torch.float32))
    return module


class Masters:
    """Float32 copies of an optimizer's 16-bit parameters, and the loss scale.

    Replaces the parameters in the optimizer's groups by their copies.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: dict[str, torch.nn.Parameter], policy: Policy
    ) -> None:
        self.scale: LossScale = policy.scale
        self.skipped = 0
        name_of = {id(p): name for name, p in named.items()}
        self.pairs: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        self._wide: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                if p.dtype in (torch.float16, torch.bfloat16):
                    master = torch.nn.Parameter(p.detach().float())
                    self.pairs[name_of.get(id(p), f"frozen.{i}")] = p, master
                    group["params"][i] = master
                    if p in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(p)
                else:
                    self._wide.append(p)

    def take_gradients(self) -> bool:
        """Hand the reduced gradients to the masters, unscaled; return whether one overflowed.

        Reduced gradients are the same bits on every rank, and so is the answer.
        """
        for p, master in self.pairs.values():
            master.grad = None if p.grad is None else p.grad.detach().float()
        masters = [m for _, m in self.pairs.values()]
        grads = [p.grad for p in (*masters, *self._wide) if p.grad is not None]
        if not self.scale.watches or not grads:
            return False
        found, inverse = torch.zeros(1), torch.tensor([1.0 / self.scale.scale])
        for kind in {g.dtype for g in grads}:
            same = [g.coalesce().values() if g.is_sparse else g for g in grads if g.dtype is kind]
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)
        return bool(found.item())

    def put_parameters(self) -> None:
        """Copy the masters into the model."""
        with torch.no_grad():
            for p, master in self.pairs.values():
                p.copy_(master)
                master.grad = None

    def advance(self, overflow: bool, reducer: Reducer) -> None:
        """Move the loss scale on; residuals, which are in its units, follow."""
        before, self.scale = self.scale.scale, self.scale.after(overflow)
        self.skipped += overflow
        if self.scale.scale != before:
            reducer.rescale(self.scale.scale / before)

    def state_dict(self) -> dict[str, Any]:
        """Return masters and scale, for a checkpoint."""
        masters = {name: master.detach() for name, (_, master) in self.pairs.items()}
        return {"masters": masters, "scale": self.scale.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Overwrite masters, model and scale; ValueError if the masters are others' ones."""
        if state["masters"].keys() != self.pairs.keys():
            odd = sorted(state["masters"].keys() ^ self.pairs.keys())
            raise ValueError(f"the checkpoint's master weights are of other parameters: {odd[:3]}")
        self.scale = self.scale.loaded(state["scale"])
        self.skipped = int(state["skipped"])
        with torch.no_grad():
            for name, (_, master) in self.pairs.items():
                master.copy_(state["masters"][name])
        self.put_parameters()


def check_policy(policy: Policy, named: dict[str, torch.nn.Parameter], op: ReduceOp) -> None:
    """Raise ValueError for a policy that does not fit, and warn of what is likely a mistake."""
    halves = [name for name, p in named.items() if p.dtype is torch.float16]
    if policy.masters and op is ReduceOp.ADASUM:
        raise ValueError("precision does not go together with op=Adasum")
    wanted = getattr(torch, policy.parameters)
    if policy.masters and named and not any(p.dtype is wanted for p in named.values()):
        raise ValueError(
            f"no parameter is {policy.parameters}: call apply_precision(model, {policy.name!r}) "
            "before the optimizer is made"
        )
    if halves and not policy.scale.watches:
        warnings.warn(
            f"{len(halves)} parameters are float16, the first {halves[0]!r}, and there is no loss "
            "scale: small gradients become zero. Pass precision='fp16'",
            stacklevel=3,
        )


def _cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(_to(a, dtype) for a in args), {k: _to(v, dtype) for k, v in kwargs.items()}

    return cast


def _cast_output(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: torch.nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)(_to(item, dtype) for item in output)
        return _to(output, dtype)

    return cast


def _to(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value
