"""The reducer: takes gradients from hooks, hands them to the engine, and waits for the result."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ringlet.compressors import Compressor
from ringlet.compressors.context import State
from ringlet.compressors.routes import Routes, Spec
from ringlet.fusion import Group, Request
from ringlet.precision.reduction import carrier
from ringlet.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.runtime import current, is_initialized
from ringlet.torch import residuals
from ringlet.torch.compression import as_router
from ringlet.torch.device import HOST, flat_at, packed, place_of
from ringlet.torch.handles import SparseHandle
from ringlet.torch.reductions import allreduce
from ringlet.torch.sparse import sparse_allreduce_async
from ringlet.torch.tensors import check, dtype_of, shares_memory
from ringlet.torch.undo import Undo

LARGE = 1 << 16  # elements from which a sparse gradient travels as indices and values

_live: weakref.WeakSet[Reducer] = weakref.WeakSet()
_live_lock = threading.Lock()


class Reducer:
    """Reduces the gradients of ``named`` parameters in every step.

    Parameters belong to the newest reducer that names them: an older one gives all of its hooks
    up, and its ``synchronize`` raises RuntimeError. A reducer that nobody holds is gone.
    ``reduction`` is a policy's, and with ``undo`` a step can be taken back.
    """

    def __init__(
        self,
        named: dict[str, torch.nn.Parameter],
        compression: Spec | Routes,
        passes: int,
        op: ReduceOp,
        predivide: float,
        process_set: ProcessSet = global_process_set,
        groups: Sequence[Sequence[str]] = (),
        sparse_as_dense: bool = False,
        reduction: str = "wire",
        undo: bool = False,
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
        self._places: dict[str, str] = {}  # where gradients lie
        self._op, self._predivide = op, predivide
        self._process_set = process_set
        self._cohorts = {name: str(i) for i, names in enumerate(groups) for name in names}
        self._left = dict.fromkeys(named, passes)
        self._ids = {id(p) for p in named.values()}
        self._after: list[Callable[[], object]] = []  # what puts results where they belong
        self._handed: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._sparse_as_dense = sparse_as_dense
        self._seen_sparse: set[str] | None = None if sparse_as_dense else set()
        self._sparse: dict[str, int] = {}  # gathered, not fused; with their sparse dimensions
        self._gathering: dict[str, SparseHandle] = {}
        self._reduction = reduction
        self._undo = Undo() if undo else None
        self._group: Group | None = None
        self._finalizer: Any = None
        self._retired = False
        self._included = process_set.included()
        self._label = current().unnamed("DistributedOptimizer", process_set.process_set_id or 0)
        self._router = as_router(compression)
        self._declare()
        self._take_over()

    @property
    def step(self) -> int:
        """How many steps schedules of compressors have seen."""
        return 0 if self._group is None else self._group.step

    def set_compression(self, compression: Spec | Routes) -> None:
        """Compress differently from the next step on. Collective; RuntimeError during a step.

        Residuals carry over to compressors with error feedback; whatever else the old ones
        remembered is forgotten.
        """
        if self.in_flight:
            raise RuntimeError("set_compression between backward() and step()")
        before, self._router = self._router, as_router(compression)
        with _at_work():
            for name, state in self.states.items():
                compressors = before(name), self._router(name)
                residuals.carry_over(state, *compressors, self._size(), self._op)
        self._declare(self.step)

    def set_passes(self, passes: int) -> None:
        """Reduce after ``passes`` backward passes from now on; RuntimeError during a step."""
        check_passes(passes)
        if self.in_flight:
            raise RuntimeError("set_backward_passes_per_step between backward() and step()")
        self.passes = passes
        self._left = dict.fromkeys(self.parameters, passes)

    def forget_passes(self) -> None:
        """Begin to count backward passes anew: what they left was discarded."""
        if not self.in_flight:
            self._left = dict.fromkeys(self.parameters, self.passes)

    def restart(self, step: int) -> None:
        """Let schedules go on at ``step``, which has to be the same on every rank."""
        if self._group is not None:
            self._group.restart(step)

    def restored(self, step: int) -> None:
        """Go on at ``step`` with states from a checkpoint, which lie where gradients do then."""
        for name, place in self._places.items():
            current().engine.bring(self.states[name], place)
        self.restart(step)

    @property
    def steps(self) -> dict[str, int]:
        """How often each parameter's gradient was compressed, and under "" ``step``."""
        counts = {name: int(state.get("step", 0)) for name, state in self.states.items()}
        return counts | {"": self.step}

    def align(self, steps: Mapping[str, int]) -> None:
        """Count as another rank does: shared random numbers and schedules depend on it."""
        for name, state in self.states.items():
            if name in steps:
                state["step"] = int(steps[name])
        self.restart(int(steps.get("", 0)))

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
            for name in [*self._group.missing(), *self._not_gathering()]:
                self._submit(name, self.parameters[name])
        except Exception as error:
            self.abandon(f"{type(error).__name__}: {error}")
            raise
        try:
            self._group.wait()
            for name, handle in self._gathering.items():
                self.parameters[name].grad = handle.wait()
            for name, grad in self._handed.items():
                self.parameters[name].grad = grad  # whatever was put there meanwhile
            after = self._after
        finally:
            for handle in self._gathering.values():
                handle.forget()
            self._reset()
        with torch.no_grad():
            for put in after:
                put()
        self._agree_on_sparse()

    def abandon(self, why: str) -> None:
        """Give up the step under way, on all ranks; nothing between steps."""
        if self._group is None:
            return
        if not self.in_flight:
            self._group.abandon(why)  # another rank's failure may have come first
            return
        for name in self._not_gathering():
            self._gather(name, self.parameters[name])
        gathering = list(self._gathering.values())
        self._reset()
        self._group.abandon(why)
        for handle in gathering:
            handle.forget()

    def agreed(self, loss: Any) -> Any:
        """Return a closure's ``loss`` reduced like the gradients, so that all ranks see one value.

        Line searches decide by it how often they evaluate, which must not differ between ranks.
        """
        if self._group is None:
            return loss
        name, process_set = f"{self._label}.loss", self._process_set
        if isinstance(loss, torch.Tensor):
            return allreduce(loss.detach(), name=name, op=self._op, process_set=process_set)
        if isinstance(loss, float):
            wide = torch.tensor(loss, dtype=torch.float64)
            return allreduce(wide, name=name, op=self._op, process_set=process_set).item()
        return loss

    def rescale(self, factor: float) -> None:
        """Multiply residuals, which are in units of a loss scale that has changed."""
        with _at_work():
            for state in self.states.values():
                residuals.rescale(state, factor)

    def undo(self) -> None:
        """Let compressors forget the last step, which is skipped."""
        if self._undo is not None:
            with _at_work():
                self._undo.restore(self.states)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what this rank's compressors hold back."""
        with _at_work():
            return residuals.norm(self.states)

    # -- inside ---------------------------------------------------------------------------------

    def _not_gathering(self) -> list[str]:
        return [name for name in self._sparse if name not in self._gathering]

    def _size(self) -> int:
        return self._process_set.size()

    def _declare(self, step: int = 0) -> None:
        runtime = current()
        for name, p in self.parameters.items():
            check(p, f"parameter {name!r}")
        if self._size() == 1 or not self._included:
            return
        number = self._process_set.number()
        self._places = {n: place_of(p, self._op) for n, p in self.parameters.items()}
        names = [name for name in self.parameters if name not in self._sparse]
        carried = [self._carried(name) for name in names]
        requests = [
            Request(
                name,
                "allreduce",
                dtype_of(self.parameters[name]),
                tuple(self.parameters[name].shape),
                self._op,
                str(compressor),
                collective,
                prescale=1.0 / self._predivide,
                postscale=self._predivide,
                process_set=number,
                group=self._cohorts.get(name, ""),
                place=self._places[name],
            )
            for name, (compressor, collective) in zip(names, carried, strict=True)
        ]
        compressors = [compressor for compressor, _ in carried]
        # Declared even without parameters: a rank that has some has to hear of it.
        states, engine = [self.states[name] for name in names], runtime.engine
        group = engine.declare(self._label, requests, compressors, states, step, number)
        if self._group is not None:
            self._finalizer.detach()
            engine.release(self._group)
        self._group = group if self.parameters else None
        self._finalizer = weakref.finalize(self, engine.release, group)

    def _carried(self, name: str) -> tuple[Compressor, str]:
        p = self.parameters[name]
        return carrier(self._router(name), dtype_of(p), p.numel(), self._reduction)

    def _begin(self) -> None:
        if not self.in_flight and self._undo is not None:
            with _at_work():
                self._undo.remember(self.states)
        self.in_flight = True

    def _agree_on_sparse(self) -> None:
        """After the first step, let large sparse gradients travel as indices and values."""
        if self._seen_sparse is None or self._group is None:
            return
        seen, self._seen_sparse = self._seen_sparse, None
        names = [n for n, p in self.parameters.items() if p.numel() >= LARGE]
        if not names:
            return
        marks = torch.tensor([1 + self._dims(n) if n in seen else 0 for n in names])
        label = f"{self._label}.sparse"
        marks = allreduce(marks, name=label, op=ReduceOp.MAX, process_set=self._process_set)
        self._sparse = {n: int(m) - 1 for n, m in zip(names, marks.tolist(), strict=True) if m}
        if self._sparse:
            self._declare(self.step)

    def _dims(self, name: str) -> int:
        grad = self.parameters[name].grad
        return 1 if grad is None or not grad.is_sparse else grad.sparse_dim()

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
        if name in self._sparse:
            self._gather(name, p)
            return
        grad = p.grad
        if grad is None:
            grad = p.grad = torch.zeros_like(p)
        assert self._group is not None
        view = self._view(name, p, grad)
        self._begin()
        self._handed[name] = grad
        self._group.submit(name, view)

    def _gather(self, name: str, p: torch.Tensor) -> None:
        grad = p.grad
        if grad is None or not grad.is_sparse:  # nothing of it was used on this rank
            dense = torch.zeros_like(p) if grad is None else grad
            grad = dense.to_sparse(self._sparse[name])
        self._begin()
        label = f"{self._label}.{name}"
        self._gathering[name] = sparse_allreduce_async(grad, label, self._op, self._process_set)

    def _view(self, name: str, p: torch.Tensor, grad: torch.Tensor) -> Array:
        if grad.dtype is not p.dtype:
            raise TypeError(f"the gradient of {name!r} is {grad.dtype}, the parameter {p.dtype}")
        place = self._places[name]
        if place != HOST and place_of(grad, self._op) != place:
            raise RuntimeError(
                f"the gradient of {name!r} is on {grad.device}, where it was not when the "
                "optimizer was made; wrap the original optimizer again"
            )
        if grad.is_sparse:
            if self._seen_sparse is not None:
                self._seen_sparse.add(name)
            dims, device = grad.sparse_dim(), grad.device
            dense = packed(grad.detach().to_dense(), place)
            self._after.append(lambda: setattr(p, "grad", dense.to(device).to_sparse(dims)))
            return flat_at(dense, place)
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {name!r} has layout {grad.layout}; use sparse COO")
        staged = packed(grad, place)
        if not shares_memory(staged, grad):
            # Of other strides, such as channels_last, or on another device.
            self._after.append(lambda: grad.copy_(staged))
        return flat_at(staged, place)

    def _reset(self) -> None:
        self.in_flight = False
        self._left = dict.fromkeys(self.parameters, self.passes)
        self._after, self._gathering, self._handed = [], {}, {}


def check_passes(passes: int) -> None:
    """Raise ValueError unless ``passes`` is a possible backward_passes_per_step."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


def _at_work() -> AbstractContextManager[None]:
    """Return a context for what is done to states, which may lie on a GPU."""
    return current().engine.at_work() if is_initialized() else nullcontext()


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
