"""What DistributedOptimizer and DistributedGradientTape are told, under Horovod's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ringlet.compressors import Router
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.precision import Policy, parse_policy
from ringlet.ring.callers import outside
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.argument_kinds import flag, grouping, number, process_set_of, whole
from ringlet.shared.compression import as_router
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_settings import Settings
from ringlet.shared.requests import SUMS, as_op


@dataclass(frozen=True)
class Options:
    """The arguments that optimizers and tapes of all frameworks have; each takes some of them."""

    compression: Any = None
    op: ReduceOp = ReduceOp.AVERAGE
    gradient_predivide_factor: float = 1.0
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    num_groups: int = 0
    groups: int | Sequence[Sequence[Any]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = field(default=global_process_set)
    scale_local_gradients: bool = True
    precision: str | Policy | None = None

    def __post_init__(self) -> None:
        """Take Horovod's numbers of ops, too, and check what the others are.

        Raises InvalidArgument, the same on every rank, for a process set that is not registered:
        before anything is counted, or ranks outside of it would count on alone. Not in elastic
        jobs, where sets are registered anew in each epoch.
        """
        self.__dict__["op"] = as_op(self.op)
        self._check_kinds()
        if self.num_groups:
            warnings.warn(
                "num_groups is deprecated; pass groups=N", DeprecationWarning, stacklevel=outside()
            )
        if self.process_set is not global_process_set and not is_elastic():
            self.process_set.size()

    def _check_kinds(self) -> None:
        """Take numbers of NumPy as Python's; TypeError, or of ``groups`` ValueError, for others."""
        kinds: dict[str, Callable[[Any, str], Any]] = {
            "gradient_predivide_factor": number,
            "backward_passes_per_step": whole,
            "average_aggregated_gradients": flag,
            "num_groups": whole,
            "sparse_as_dense": flag,
            "scale_local_gradients": flag,
        }
        for name, kind in kinds.items():
            self.__dict__[name] = kind(getattr(self, name), name)
        self.__dict__["groups"] = grouping(self.groups)
        process_set_of(self.process_set)

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Return the options that are among a function's ``arguments``: its ``locals()``."""
        return cls(**{e.name: arguments[e.name] for e in fields(cls) if e.name in arguments})

    @cached_property
    def policy(self) -> Policy:
        """What ``precision`` names. Raises ValueError."""
        return parse_policy(self.precision)

    @property
    def described_precision(self) -> str:
        """The policy and its loss scale, in words."""
        scale = self.policy.scale
        return f"{self.policy.name}, {type(scale).__name__} {scale.state_dict()}"

    @property
    def passes(self) -> dict[str, object]:
        """What ranks must have in common where each step ends with the last of its passes."""
        average = self.average_aggregated_gradients and self.backward_passes_per_step > 1
        return {
            "backward_passes_per_step": self.backward_passes_per_step,
            "average_aggregated_gradients": bool(average),
        }

    @cached_property
    def router(self) -> Router:
        """What ``compression`` names, or the policy's where it is None. Raises SpecError."""
        chosen = self.policy.compression if self.compression is None else self.compression
        return as_router(chosen)

    @property
    def grouping(self) -> int | Sequence[Sequence[Any]] | None:
        """What travels together: ``groups``, or its deprecated form ``num_groups``."""
        return self.num_groups if self.groups is None and self.num_groups else self.groups

    def check_sums(self) -> None:
        """Raise ValueError for an op of which gradients are no sum."""
        if self.op not in SUMS:
            adasum = "; DistributedGradientTape takes it" if self.op is ReduceOp.ADASUM else ""
            raise ValueError(f"op must be Average or Sum, not {self.op.name.title()}{adasum}")

    def settings(self, guard: bool = False) -> Settings:
        """Return what a reducer of NumPy arrays needs to know; ``guard`` as there."""
        return Settings(
            self.router,
            self.op,
            self.gradient_predivide_factor,
            self.process_set,
            self.sparse_as_dense,
            guard,
            self.policy.reduction,
            self.described_precision,
        )

    def accumulator(self) -> Accumulator:
        """Return what adds up the gradients of several backward passes."""
        return Accumulator(self.backward_passes_per_step, self.average_aggregated_gradients)
