"""What ranks declare of a model's gradients to the engine, and how far its schedules are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringlet.compressors import Compressor
from ringlet.compressors.specs.edition import edition
from ringlet.fusion import Group, Request
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.job.session import Runtime, current
from ringlet.precision.reduction import carrier
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.torch.optimizer.sparse_gradients import SparseGradients
from ringlet.torch.optimizer.step_agreement import StepAgreement
from ringlet.torch.parameters.parameter_memory import ParameterMemory
from ringlet.torch.tensors.placement import place_of
from ringlet.torch.tensors.views import check, dtype_of


class DeclaredGradients:
    """The gradients of ``parameters`` as one ``group`` of the engine's, but for those in ``rows``.

    They are declared in each epoch of a job, under one ``label``; again where compressors change,
    which remember ``memory``, or where gradients begin to travel as rows. The engine forgets the
    group when nobody holds this any more. ``groups`` are names of those that travel together. With
    ``unscaling``, results are free of a loss scale.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        options: Options,
        memory: ParameterMemory,
        groups: Sequence[Sequence[str]],
        unscaling: Unscaling | None,
        title: str,
    ) -> None:
        self.parameters, self.unscaling = parameters, unscaling
        self.op, self.process_set = options.op, options.process_set
        self.label = ""  # the same on all ranks; none before the first epoch
        self.group: Group | None = None  # None where this rank reduces alone
        self.agreement: StepAgreement  # of the group's steps
        self.places: dict[str, str] = {}  # where gradients lie
        self.compressors: dict[str, Compressor] = {}  # with what they were declared last, by name
        as_dense = options.sparse_as_dense
        self.rows = SparseGradients(parameters, self.op, self.process_set, as_dense)
        self._included = self.process_set.included()
        self._memory, self._title = memory, title
        self._predivide = options.gradient_predivide_factor
        self._reduction = options.policy.reduction
        self._cohorts = {name: str(i) for i, names in enumerate(groups) for name in names}
        self._start = 0  # steps before the group's
        self._shown = ""  # the title, numbered, for as long as the label
        self._declarations = 0  # under the label
        self._finalizer: Any = None

    @property
    def only_rank(self) -> bool:
        """Whether this is the only rank that reduces these gradients."""
        return self._included and self.process_set.size() == 1

    @property
    def step(self) -> int:
        """How many steps schedules of compressors have seen."""
        return self._start if self.group is None else self.group.step

    @property
    def steps(self) -> dict[str, int]:
        """How often each parameter's gradient was compressed, and under "" ``step``."""
        return self._memory.steps | {"": self.step}

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by."""
        return 1.0 if self.unscaling is None else self.unscaling.scale

    def restart(self, step: int) -> None:
        """Let schedules go on at ``step``, which has to be the same on every rank."""
        self._start = step
        if self.group is not None:
            self.group.restart(step)

    def align(self, steps: Mapping[str, int]) -> None:
        """Count as another rank does: shared random numbers and schedules depend on it."""
        self._memory.align({name: n for name, n in steps.items() if name in self.parameters})
        self.restart(int(steps.get("", 0)))

    def begin_epoch(self) -> None:
        """Begin with nothing declared, and a new label, among the ranks of this epoch."""
        self._start = self.step
        if self.group is not None:
            self._finalizer.detach()  # its engine has ended
        self.group, self.places = None, {}
        number = self.process_set.process_set_id or 0
        self.label = current().unnamed("DistributedOptimizer", number)
        self._shown, self._declarations = "", 0
        self.rows.begin_epoch(self.label)
        self._included = self.process_set.included()

    def declare(self) -> None:
        """Declare the gradients with the present engine, if there are other ranks. Collective."""
        runtime, compressors = current(), self._memory.compressors()
        for name, p in self.parameters.items():
            check(p, f"parameter {name!r}")
        if self.process_set.size() == 1 or not self._included:
            self.compressors = compressors
            return
        self.places = {name: place_of(p, self.op) for name, p in self.parameters.items()}
        names = [name for name in self.parameters if name not in self.rows.dims]
        carried = [self.carried(name) for name in names]
        # Declared even without parameters: a rank that has some has to hear of it.
        requests = [self._request(n, *each) for n, each in zip(names, carried, strict=True)]
        states = [self._memory.states[name] for name in names]
        # Before others know that all have declared: one of them may tell of a change at once.
        self._declarations += 1
        which, ranks = (self.label, self._declarations), self.process_set
        agreement = StepAgreement(runtime, *which, self._memory, ranks)
        early = len(set(runtime.topology.hosts)) > 1  # on one host a bucket more hides no wire
        declared = self.label, requests, [compressor for compressor, _ in carried], states
        group = runtime.engine.declare(*declared, self.step, ranks.number(), early)
        self.compressors, self.agreement = compressors, agreement
        self._go_on_with(group, runtime)

    def carried(self, name: str) -> tuple[Compressor, str]:
        """Return what compresses a parameter's gradient on the wire, and by which collective."""
        p, number = self.parameters[name], self.process_set.number()
        dtype = dtype_of(p)
        exact = current().engine.sums_in_float32(dtype, number)
        compressor = self._memory.compressor_of(name)
        return carrier(compressor, dtype, p.numel(), self._reduction, exact)

    def _request(self, name: str, compressor: Compressor, collective: str) -> Request:
        p = self.parameters[name]
        return Request(
            name,
            "allreduce",
            dtype_of(p),
            tuple(p.shape),
            self.op,
            str(compressor),
            collective,
            prescale=1.0 / self._predivide,
            postscale=self._predivide,
            process_set=self.process_set.number(),
            group=self._cohorts.get(name, ""),
            place=self.places[name],
            edition=edition(compressor),
        )

    def _go_on_with(self, group: Group, runtime: Runtime) -> None:
        """Reduce by ``group`` from now on, and let the engine forget the one before."""
        self._shown = self._shown or runtime.title(self._title)
        runtime.engine.entitle(group, self._shown)
        if self.group is not None:
            self._finalizer.detach()
            runtime.engine.release(self.group)
        group.unscale(self.unscaling)
        self.group = group if self.parameters else None
        self._finalizer = weakref.finalize(self, runtime.engine.release, group)
