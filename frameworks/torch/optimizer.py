"""DistributedOptimizer: reduces gradients as backward produces them, then steps."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ringlet.compressors.context import State
from ringlet.compressors.routes import Routes, Spec
from ringlet.fusion import Group, Request
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.runtime import current
from ringlet.torch.compression import as_router
from ringlet.torch.naming import Named, name_parameters
from ringlet.torch.tensors import check, dtype_of, flat

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

_instances = itertools.count()


class Reducer:
    """Collects gradients from hooks, hands them to the engine, and waits for their reduction."""

    def __init__(
        self,
        named: dict[str, torch.nn.Parameter],
        compression: Spec | Routes,
        passes: int,
        op: ReduceOp,
        predivide: float,
    ) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum for gradients, not {op.name.title()}")
        if predivide != 1.0 and op is not ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if not (predivide > 0 and math.isfinite(predivide)):
            raise ValueError(f"gradient_predivide_factor must be above 0, got {predivide}")
        self.parameters = named
        self.passes = passes
        self.states: dict[str, State] = {name: {} for name in named}
        self.in_flight = False
        self._left = dict.fromkeys(named, passes)
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks: list[Any] = []
        self._group: Group | None = None
        runtime, router = current(), as_router(compression)
        compressors = [router(name) for name in named]
        requests: list[Request] = []
        for (name, p), compressor in zip(named.items(), compressors, strict=True):
            check(p, f"parameter {name!r}")
            scales = {"prescale": 1.0 / predivide, "postscale": predivide}
            spec, shape = str(compressor), tuple(p.shape)
            requests.append(Request(name, "allreduce", dtype_of(p), shape, op, spec, **scales))
        if runtime.size > 1 and named:
            label = f"DistributedOptimizer.{next(_instances)}"
            states = [self.states[name] for name in named]
            self._group = runtime.engine.declare(label, requests, compressors, states)
            for name, p in named.items():
                register: Any = p.register_post_accumulate_grad_hook
                self._hooks.append(register(self._hook(name)))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(p: torch.Tensor) -> None:
            left = self._left[name] = self._left[name] - 1
            if left < 0:
                raise RuntimeError(
                    f"the gradient of {name!r} was computed more than backward_passes_per_step="
                    f"{self.passes} times before step(); raise backward_passes_per_step to "
                    "accumulate gradients"
                )
            if left == 0:
                self._submit(name, p)

        return ready

    def _submit(self, name: str, p: torch.Tensor) -> None:
        grad = p.grad
        if grad is None:
            grad = p.grad = torch.zeros_like(p)
        assert self._group is not None
        self.in_flight = True
        self._group.submit(name, self._view(name, grad))

    def _view(self, name: str, grad: torch.Tensor) -> Array:
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {name!r} is sparse; use sparse=False in its layer")
        if grad.is_contiguous():
            return flat(grad)
        packed = grad.detach().contiguous()  # other strides, such as channels_last
        self._staged.append((packed, grad))
        return flat(packed)

    def synchronize(self) -> None:
        """Reduce what no hook handed in (as zeros if there is no gradient), and wait for all."""
        if self._group is None:
            return
        for name in self._group.missing():
            self._submit(name, self.parameters[name])
        try:
            self._group.wait()
        finally:
            self.in_flight = False
            self._left = dict.fromkeys(self.parameters, self.passes)
            staged, self._staged = self._staged, []
        with torch.no_grad():
            for packed, grad in staged:
                grad.copy_(packed)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what this rank's compressors hold back."""
        return math.sqrt(sum(_energy(state) for state in self.states.values()))


def _energy(state: State) -> float:
    total = 0.0
    for key, value in state.items():
        if isinstance(value, dict):
            total += _energy(value)
        elif key == "residual":
            wide = value.astype("float64")
            total += float(wide @ wide)
    return total


class _Distributed:
    """What DistributedOptimizer adds to the class of the optimizer that it wraps."""

    _ringlet: Reducer
    _ringlet_synchronized: bool
    _ringlet_skip: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them before ``step``."""
        self._ringlet.synchronize()
        self._ringlet_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step without synchronising again, after a ``synchronize`` of one's own."""
        self._ringlet_skip = True
        try:
            yield
        finally:
            self._ringlet_skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise, then take the wrapped optimizer's step.

        With a ``closure``, every evaluation of it is followed by a synchronisation.
        """
        inner: Any = super()
        if closure is not None:

            def synchronized() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._ringlet.synchronize()
                return loss

            return inner.step(synchronized)
        if not self._ringlet_skip:
            if self._ringlet_synchronized:
                warnings.warn(
                    "step() after synchronize() reduces the gradients a second time; write "
                    "'with optimizer.skip_synchronize(): optimizer.step()'",
                    stacklevel=2,
                )
            self._ringlet.synchronize()
        self._ringlet_synchronized = False
        return inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; RuntimeError while they are being reduced."""
        if self._ringlet.in_flight:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the gradients are being reduced. "
                "Call it after step(), or synchronize() first"
            )
        inner: Any = super()
        inner.zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up before gradients are reduced."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
        if self._ringlet.in_flight:
            raise RuntimeError("set_backward_passes_per_step between backward() and step()")
        self._ringlet.passes = passes
        self._ringlet._left = dict.fromkeys(self._ringlet.parameters, passes)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._ringlet.residual_norm()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Opt,
    named_parameters: Named | None = None,
    compression: Spec | Routes = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
) -> Opt:
    """Return ``optimizer`` with gradients reduced over all ranks before every step. Collective.

    The result is an instance of a subclass of the optimizer's class that shares its parameter
    groups and state; use it instead of the original.

    - ``named_parameters``: ``model.named_parameters()``.
    - ``compression``: a spec such as ``"topk(ratio=0.01) | ef"``, a Compressor, or a mapping from
      name patterns to specs, first match first: ``{"*.bias": "none", "*": "int8 | ef"}``.
    - ``backward_passes_per_step``: passes whose gradients are summed before they are reduced.
    - ``op``: Average or Sum.
    - ``gradient_predivide_factor``: divide by this before the sum and by size / this after it.

    Raises Mismatch, the same on every rank, when ranks hold different parameters or arguments;
    ValueError for names that do not fit the parameters; SpecError for a bad ``compression``.
    """
    named = name_parameters(optimizer, named_parameters)
    reducer = Reducer(
        named, compression, backward_passes_per_step, ReduceOp(op), gradient_predivide_factor
    )
    base = type(optimizer)
    cls: Any = type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__})
    distributed: Any = cls.__new__(cls)
    distributed.__dict__.update(optimizer.__dict__)
    # A scheduler made for the original has wrapped its step on the instance; ours must be found.
    distributed.__dict__.pop("step", None)
    distributed._ringlet = reducer
    distributed._ringlet_synchronized = False
    distributed._ringlet_skip = False
    result: Opt = distributed
    return result
