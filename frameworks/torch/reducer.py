"""The reducer: takes gradients from hooks, hands them to the engine, and waits for the result."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ringlet.compressors import Compressor
from ringlet.compressors.context import State
from ringlet.compressors.routes import Routes, Spec
from ringlet.compressors.states import carry_over, rescale
from ringlet.fusion import Group, Request
from ringlet.fusion.unscaling import Unscaling
from ringlet.precision.reduction import carrier
from ringlet.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.runtime import current, is_initialized
from ringlet.torch import residuals
from ringlet.torch.compression import as_router
from ringlet.torch.device import HOST, place_of
from ringlet.torch.gradhooks import GradHooks
from ringlet.torch.handed import Handed
from ringlet.torch.handles import SparseHandle
from ringlet.torch.reductions import allreduce
from ringlet.torch.rows import Rows
from ringlet.torch.tensors import check, dtype_of
from ringlet.torch.undo import Undo


class Reducer:
    """Reduces the gradients of ``named`` parameters in every step.

    Parameters belong to the newest reducer that names them: an older one gives all of its hooks
    up, and its ``synchronize`` raises RuntimeError. A reducer that nobody holds is gone.
    ``reduction`` is a policy's. With ``unscaling``, a policy's too, a step can be taken back.
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
        unscaling: Unscaling | None = None,
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
        self.renewed = False  # whether backward has run since the last ``synchronize``
        self.passes = passes
        self._op, self._predivide = op, predivide
        self._process_set = process_set
        self._cohorts = {name: str(i) for i, names in enumerate(groups) for name in names}
        self._left = dict.fromkeys(named, passes)
        self._label = current().unnamed("DistributedOptimizer", process_set.process_set_id or 0)
        self._rows = Rows(named, self._label, op, process_set, sparse_as_dense)
        self._handed = Handed(op)
        self._hooks = GradHooks(self, named)
        self._reduction, self._unscaling = reduction, unscaling
        self._undo = None if unscaling is None else Undo()
        self._group: Group | None = None
        self._finalizer: Any = None
        self._included = process_set.included()
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
                average = self._op is ReduceOp.AVERAGE
                carry_over(state, before(name), self._router(name), self._size(), average)
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
            self._handed.clear()
            self.renewed = False
            if self._group is not None:
                self._group.acknowledge()

    def restart(self, step: int) -> None:
        """Let schedules go on at ``step``, which has to be the same on every rank."""
        if self._group is not None:
            self._group.restart(step)

    @property
    def compressors(self) -> dict[str, Compressor]:
        """What compresses each parameter's gradient, as it was declared."""
        return {name: self._router(name) for name in self.parameters}

    @property
    def tensors(self) -> dict[str, residuals.Tensor]:
        """The same, with how many elements each has."""
        return {name: (self._router(name), p.numel()) for name, p in self.parameters.items()}

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged, and not added up."""
        return self._op is ReduceOp.AVERAGE

    def restored(self, step: int) -> None:
        """Go on at ``step`` with states from a checkpoint, which lie where gradients do then."""
        for name, place in self._handed.places.items():
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

    def deliver(self, results: Mapping[str, torch.Tensor]) -> None:
        """Let results go to ``results`` (float32, of the parameters' shapes), by name.

        Those of gradients that are elsewhere than in host memory, or travel as rows, stay there.
        """
        places = self._handed.places
        self._handed.results = {n: r for n, r in results.items() if places.get(n) == HOST}

    def delivered(self, name: str) -> torch.Tensor | None:
        """Return where the last result was delivered to; None if it is in the gradient."""
        return self._handed.result(name)

    def disown(self) -> None:
        """Note that the last results are not used: what a caller wrote to them is no damage."""
        if self._group is not None:
            self._group.disown()

    @property
    def touched(self) -> str | None:
        """A gradient that was written to between backward and the end of the last step, if any."""
        return self._handed.touched

    def unscaled(self, name: str) -> bool:
        """Whether the last result is divided by the loss scale, and was looked at, already."""
        fused = name in self._handed.last and self._handed.places[name] == HOST
        return fused and self._unscaling is not None

    @property
    def finite(self) -> bool:
        """Whether all that is ``unscaled`` is finite."""
        return self._group is None or self._group.finite

    def synchronize(self, param_groups: list[dict[str, Any]]) -> None:
        """Reduce what no hook handed in (as zeros if there is no gradient), and wait for all.

        Raises RuntimeError if another reducer has the parameters now, or if ``param_groups`` holds
        one with a gradient that was never this reducer's: each rank would update it on its own.
        """
        if self._hooks.retired:
            raise RuntimeError(
                "another DistributedOptimizer was made for the same parameters; use that one"
            )
        self._refuse_strays(param_groups)
        if self._group is None:
            self._handed.look()
            self._handed.clear()
            self.renewed = False
            return
        try:
            for name in [*self._group.missing(), *self._rows.missing()]:
                self._submit(name, self.parameters[name])
        except Exception as error:
            self.abandon(f"{type(error).__name__}: {error}")
            raise
        try:
            self._group.wait()
            self._rows.collect()
            self._handed.put(self.parameters)
        finally:
            for handle in self._reset():
                handle.forget()
        if self._rows.agree():
            self._declare(self.step)

    def abandon(self, why: str) -> None:
        """Give up the step at hand on all ranks: see ``Group.abandon``."""
        if self._group is None:
            return
        if not self.in_flight:
            self._group.abandon(why)
            return
        for name in self._rows.missing():
            self._rows.gather(name)
        self._group.abandon(why)  # or the step was reduced already: then it can still be taken
        for handle in self._reset():
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
        if factor == 1.0:
            return
        with _at_work():
            for name, state in self.states.items():
                rescale(state, self._router(name), factor)

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

    def _size(self) -> int:
        return self._process_set.size()

    def _declare(self, step: int = 0) -> None:
        runtime = current()
        for name, p in self.parameters.items():
            check(p, f"parameter {name!r}")
        if self._size() == 1 or not self._included:
            return
        number = self._process_set.number()
        places = {n: place_of(p, self._op) for n, p in self.parameters.items()}
        self._handed.places = places
        names = [name for name in self.parameters if name not in self._rows]
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
                place=places[name],
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
        group.unscale(self._unscaling)
        self._group = group if self.parameters else None
        self._finalizer = weakref.finalize(self, engine.release, group)

    def _carried(self, name: str) -> tuple[Compressor, str]:
        p, number = self.parameters[name], self._process_set.number()
        dtype = dtype_of(p)
        exact = current().engine.sums_in_float32(dtype, number)
        return carrier(self._router(name), dtype, p.numel(), self._reduction, exact)

    def _begin(self) -> None:
        if not self.in_flight and self._undo is not None:
            with _at_work():
                self._undo.remember(self.states)
        self.in_flight = True

    def _refuse_strays(self, param_groups: list[dict[str, Any]]) -> None:
        for i, group in enumerate(param_groups):
            for j, p in enumerate(group["params"]):
                if p.grad is not None and p not in self._hooks:
                    raise RuntimeError(
                        f"parameter {j} of group {i}, shape {list(p.shape)}, was added or unfrozen "
                        "after DistributedOptimizer was made, so its gradient is not reduced; "
                        "wrap the original optimizer again"
                    )

    def _take_over(self) -> None:
        self._hooks.take_over()
        self._hooks.register(Reducer._note if self._group is None else Reducer._ready)

    def _note(self, name: str, p: torch.Tensor) -> None:
        self.renewed = True
        if p.grad is not None:
            self._handed.note(name, p.grad)

    def _ready(self, name: str, p: torch.Tensor) -> None:
        self.renewed = True
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
        if name in self._rows:
            self._begin()
            self._rows.gather(name)
            return
        assert self._group is not None
        if p.grad is not None and p.grad.is_sparse:
            self._rows.saw(name)
        values, result = self._handed.take(name, p)
        self._begin()
        self._group.submit(name, values, result)

    def _reset(self) -> list[SparseHandle]:
        """Begin a new step; return what was being gathered."""
        self.in_flight = self.renewed = False
        self._left = dict.fromkeys(self.parameters, self.passes)
        self._handed.clear()
        return self._rows.release()


def check_passes(passes: int) -> None:
    """Raise ValueError unless ``passes`` is a possible backward_passes_per_step."""
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


def _at_work() -> AbstractContextManager[None]:
    """Return a context for what is done to states, which may lie on a GPU."""
    return current().engine.at_work() if is_initialized() else nullcontext()
