"""What the gradients of a step are, and how they are reduced."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ringlet.compressors import Router
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.requests import check_predivide, reduced_as

LARGE = 1 << 16  # elements of a table from which its sparse gradients travel as rows


@dataclass(frozen=True)
class Slot:
    """One gradient in a step: its variable's name, dtype and shape.

    ``sparse`` gradients come as values and indices. ``cohort`` names those that travel together.
    ``early`` is one of earlier backward passes, and not of the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sparse: bool = False
    cohort: str = ""
    early: bool = False

    @property
    def inputs(self) -> int:
        """How many arrays the gradient is given as."""
        return 2 if self.sparse else 1

    def describe(self) -> str:
        """Return what all ranks must have in common, in words."""
        kind = f"{'sparse ' if self.sparse else ''}{self.dtype}{list(self.shape)}"
        return f"{kind}, not in the last backward pass" if self.early else kind


@dataclass(frozen=True)
class CommonValue:
    """What ranks must have in common in a step, beside gradients; ``cure`` is what to do else."""

    name: str
    value: str
    cure: str


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced. ``guard`` skips a step on all ranks when one has an overflow.

    ``reduction`` is a precision policy's, which ``precision`` tells in words.
    """

    router: Router
    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0
    process_set: ProcessSet = field(default=global_process_set)
    sparse_as_dense: bool = False
    guard: bool = False
    reduction: str = "wire"
    precision: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for arguments that do not go together."""
        check_predivide(self.predivide, self.op)
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
            raise ValueError(f"op must be Average, Sum or Adasum, not {self.op.name.title()}")
        reduced_as("float32", self.op, self.router(""))

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged, and not combined in another way."""
        return self.op is ReduceOp.AVERAGE

    def key(self) -> tuple[object, ...]:
        """Return what distinguishes these settings from others among the same ranks."""
        plain = (self.op, self.predivide, self.sparse_as_dense, self.guard, self.reduction)
        return (str(self.router), *plain, self.precision)

    def told(self) -> dict[str, object]:
        """Return what ranks must have in common and requests do not tell, by name."""
        return {
            "precision": self.precision or "none",
            "sparse_as_dense": bool(self.sparse_as_dense),
            "that a step is skipped for an overflow before it is compressed": self.guard,
        }

    def dense(self, slot: Slot) -> bool:
        """Whether a gradient is fused with others, rather than gathered as rows."""
        return not slot.sparse or self.sparse_as_dense or math.prod(slot.shape) < LARGE
