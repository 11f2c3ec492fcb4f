"""The reducer: takes gradients from hooks, hands them to the engine, and waits for the result."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ringlet.compressors.context import State
from ringlet.compressors.routes import Routes, Spec
from ringlet.fusion import Group, Request
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.runtime import current
from ringlet.torch.compression import as_router
from ringlet.torch.ops import allreduce
from ringlet.torch.tensors import check, dtype_of, flat

_live: weakref.WeakSet[Reducer] = weakref.WeakSet()
_live_lock = threading.Lock()


class Reducer:
    """Reduces the gradients of ``named`` parameters in every step.

    Parameters belong to the newest reducer that names them: an older one gives all of its hooks
    up, and its ``synchronize`` raises RuntimeError. A reducer that nobody holds is gone.
    """

    def __init__(
        self,
        named: dict[str, torch.nn.Parameter],
        compression: Spec | Routes,
        passes: int,
        op: ReduceOp,
        predivide: float,
    ) -> None:
        check_passes(passes)
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum for gradients, not {op.name.title()}")
        if predivide != 1.0 and op is not ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if not (predivide > 0 and math.isfinite(predivide)):
            raise ValueError(f"gradient_predivide_factor must be above 0, got {predivide}")
        self.parameters = named
        self.states: dict[str, State] = {name: {} for name in named}
        self.in_flight = False
        self.passes = passes
        self._op = op
        self._left = dict.fromkeys(named, passes)
        self._ids = {id(p) for p in named.values()}
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._group: Group | None = None
        self._retired = False
        self._predivide = predivide
        self._label = current().unnamed("DistributedOptimizer")
        self._declare(compression)
        self._take_over()

    def _declare(self, compression: Spec | Routes) -> None:
        runtime, router = current(), as_router(compression)
        compressors = [router(name) for name in self.parameters]
        requests: list[Request] = []
        for (name, p), compressor in zip(self.parameters.items(), compressors, strict=True):
            check(p, f"parameter {name!r}")
            requests.append(
                Request(
                    name,
                    "allreduce",
                    dtype_of(p),
                    tuple(p.shape),
                    self._op,
                    str(compressor),
                    prescale=1.0 / self._predivide,
                    postscale=self._predivide,
                )
            )
        if runtime.size > 1:
            # Declared even without parameters: a rank that has some has to hear of it.
            states = [self.states[name] for name in self.parameters]
            group = runtime.engine.declare(self._label, requests, compressors, states)
            if self._group is not None:
                runtime.engine.release(self._group)
            self._group = group if self.parameters else None
            weakref.finalize(self, runtime.engine.release, group)

    def set_compression(self, compression: Spec | Routes) -> None:
        """Compress differently from the next step on. Collective; RuntimeError during a step.

        Residuals carry over to compressors with error feedback; whatever else the old ones
        remembered is forgotten.
        """
        if self.in_flight:
            raise RuntimeError("set_compression between backward() and step()")
        router = as_router(compression)
        for name, state in self.states.items():
            kept = {"residual", "step"} if " | ef" in f" | {router(name)}" else {"step"}
            for key in state.keys() - kept:
                del state[key]
        self._declare(compression)

    def set_passes(self, passes: int) -> None:
        """Reduce after ``passes`` backward passes from now on; RuntimeError during a step."""
        check_passes(passes)
        if self.in_flight:
            raise RuntimeError("set_backward_passes_per_step between backward() and step()")
        self.passes = passes
        self._left = dict.fromkeys(self.parameters, passes)

    def synchronize(self, param_groups: list[dict[str, Any]]) -> None:
        """Reduce what no hook handed in (as zeros if there is no gradient), and wait for all.

        Raises RuntimeError if another reducer has the parameters now, or if ``param_groups`` holds
        one with a gradient that was never this reducer's: each rank would update it on its own.
        """
        if self._retired:
            raise RuntimeError(
                "another DistributedOptimizer was made for the same parameters; use that one"
            )
        self._refuse_strays(param_groups)
        if self._group is None:
            return
        try:
            for name in self._group.missing():
                self._submit(name, self.parameters[name])
            self._group.wait()
        finally:
            self.in_flight = False
            self._left = dict.fromkeys(self.parameters, self.passes)
            staged, self._staged = self._staged, []
        with torch.no_grad():
            for packed, grad in staged:
                grad.copy_(packed)

    def agreed(self, loss: Any) -> Any:
        """Return a closure's ``loss`` reduced like the gradients, so that all ranks see one value.

        Line searches decide by it how often they evaluate, which must not differ between ranks.
        """
        if self._group is None:
            return loss
        name = f"{self._label}.loss"
        if isinstance(loss, torch.Tensor):
            return allreduce(loss.detach(), name=name, op=self._op)
        if isinstance(loss, float):
            wide = torch.tensor(loss, dtype=torch.float64)
            return allreduce(wide, name=name, op=self._op).item()
        return loss

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what this rank's compressors hold back."""
        return math.sqrt(sum(_energy(state) for state in self.states.values()))

    # -- inside ---------------------------------------------------------------------------------

    def _refuse_strays(self, param_groups: list[dict[str, Any]]) -> None:
        for i, group in enumerate(param_groups):
            for j, p in enumerate(group["params"]):
                if p.grad is not None and id(p) not in self._ids:
                    raise RuntimeError(
                        f"parameter {j} of group {i}, shape {list(p.shape)}, was added or unfrozen "
                        "after DistributedOptimizer was made, so its gradient is not reduced; "
                        "wrap the original optimizer again"
                    )

    def _take_over(self) -> None:
        with _live_lock:
            for other in list(_live):
                if not self._ids.isdisjoint(other._ids):
                    other._retired = True
                    _remove(other._hooks)
            _live.add(self)
        if self._group is not None:
            for name, p in self.parameters.items():
                register: Any = p.register_post_accumulate_grad_hook
                self._hooks.append(register(_hook(weakref.ref(self), name)))
        weakref.finalize(self, _remove, self._hooks)

    def _ready(self, name: str, p: torch.Tensor) -> None:
        left = self._left[name] = self._left[name] - 1
        if left < 0:
            raise RuntimeError(
                f"the gradient of {name!r} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(); raise backward_passes_per_step to "
                "accumulate gradients"
            )
        if left == 0:
            self._submit(name, p)

    def _submit(self, name: str, p: torch.Tensor) -> None:
        grad = p.grad
        if grad is None:
            grad = p.grad = torch.zeros_like(p)
        assert self._group is not None
        self.in_flight = True
        self._group.submit(name, self._view(name, p, grad))

    def _view(self, name: str, p: torch.Tensor, grad: torch.Tensor) -> Array:
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {name!r} is sparse; use sparse=False in its layer")
        if grad.dtype is not p.dtype:
            raise TypeError(f"the gradient of {name!r} is {grad.dtype}, the parameter {p.dtype}")
        if grad.is_contiguous():
            return flat(grad)
        packed = grad.detach().contiguous()  # other strides, such as channels_last
        self._staged.append((packed, grad))
        return flat(packed)


def check_passes(passes: int) -> None:
    """Raise ValueError unless ``passes`` is a possible backward_passes_per_step."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


def _hook(reducer: weakref.ref[Reducer], name: str) -> Callable[[torch.Tensor], None]:
    """Return a hook that does not keep its reducer alive: parameters outlive optimizers."""

    def ready(p: torch.Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner._ready(name, p)

    return ready


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _energy(state: State) -> float:
    total = 0.0
    for key, value in state.items():
        if isinstance(value, dict):
            total += _energy(value)
        elif key == "residual":
            wide = value.astype("float64")
            total += float(wide @ wide)
    return total
