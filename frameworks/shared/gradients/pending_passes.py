"""What backward passes have added up since the last step, as a record for checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlet.ring.callers import outside
from ringlet.ring.dtypes import Array
from ringlet.shared import residual_store
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.gradients.gradient_settings import CommonValue, Slot
from ringlet.shared.state_record import is_numpy

Sums = Mapping[str, tuple[Slot, tuple[Array, ...]]]

_FIRST = "they are forgotten, and the next pass is the first of a step"


@dataclass(frozen=True)
class Pending:
    """The gradients of this rank that ``count`` of ``passes`` have added up, by variable's name.

    Each is a table, or its rows and their indices; those of 16 bits are in float32.
    """

    passes: int
    count: int = 0
    sums: Sums = field(default_factory=dict)

    def __str__(self) -> str:
        return f"gradients that {self.count} of {self.passes} backward passes have added up"

    def record(self) -> dict[str, Any]:
        """Return it as plain values and arrays."""
        sums = {
            name: {
                "dtype": slot.dtype,
                "shape": list(slot.shape),
                "sparse": slot.sparse,
                "parts": list(parts),
            }
            for name, (slot, parts) in self.sums.items()
        }
        return {"passes": self.passes, "count": self.count, "sums": sums}

    @classmethod
    def of(cls, record: Any) -> Pending:
        """Return what a ``record`` is of. Raises ValueError for one that is damaged."""
        try:
            passes, count, sums = (record[key] for key in ("passes", "count", "sums"))
            whole = type(passes) is type(count) is int and 0 <= count < max(passes, 1)
            found = {name: _sum(name, entry) for name, entry in sums.items()}
        except Exception as error:
            raise ValueError(f"what passes have added up is no record: {error!r}") from error
        if not whole:
            raise ValueError(f"what passes have added up is of {count!r} of {passes!r} passes")
        return cls(passes, count, found)


def agreed(resumed: int) -> CommonValue:
    """Return what ranks must have in common that have ``resumed`` so many passes of a step."""
    return CommonValue(
        "backward passes that were added up before",
        str(resumed),
        "load compressor state of one time on all ranks, or on none",
    )


def read_pending(data: bytes, rank: int, size: int) -> list[Pending] | None:
    """Return what is pending in the bytes of a checkpoint; None where it is older than that.

    Warns, and returns that nothing is, where it is another rank's. Raises ValueError for a record
    that is damaged.
    """
    records, whose = residual_store.passes_in(data)
    if records is None:
        return None
    found = [Pending.of(record) for record in records]
    held = [each for each in found if each.count]
    if not held or whose == (rank, size):
        return found
    warnings.warn(
        f"the checkpoint holds {held[0]} on rank {whose[0]} of {whose[1]}, this is rank {rank} of "
        f"{size}: {_FIRST}",
        stacklevel=outside(),
    )
    return [Pending(each.passes) for each in found]


def other_number(pending: Pending, passes: int) -> str:
    """Return why what is ``pending`` is of no use to a step of so many ``passes``."""
    return f"{pending}, and a step has {passes} here"


def warn_of_forgotten(reasons: Sequence[str]) -> None:
    """Warn of what is forgotten of a checkpoint, if anything is."""
    for reason in dict.fromkeys(reasons):
        warnings.warn(f"the checkpoint holds {reason}: {_FIRST}", stacklevel=outside())


def warn_of_misfits(names: Sequence[str]) -> None:
    """Warn that the sums of ``names`` fit no variable here, if there are any."""
    if names:
        warnings.warn(
            "gradients that passes before the checkpoint have added up are forgotten, as variables "
            f"here have other names or shapes: of {residual_store.listed(sorted(names))}",
            stacklevel=outside(),
        )


def _sum(name: str, entry: Any) -> tuple[Slot, tuple[Array, ...]]:
    shape = tuple(entry["shape"])
    slot, parts = Slot(name, entry["dtype"], shape, entry["sparse"]), tuple(entry["parts"])
    dtype = numpy_dtype(slot.dtype)
    values, *places = parts
    fits = type(slot.sparse) is bool and all(map(is_numpy, parts)) and len(parts) == slot.inputs
    fits = fits and values.dtype == (np.float32 if dtype.itemsize == 2 else dtype)
    if slot.sparse:
        (indices,) = places
        fits = fits and indices.dtype.kind == "i" and indices.shape == values.shape[:1]
        fits = fits and bool(((indices >= 0) & (indices < shape[0])).all())
        shape = (*values.shape[:1], *shape[1:])
    if not fits or values.shape != shape:
        raise ValueError(f"the sum of {name!r} is of another shape or dtype than its variable")
    return slot, parts
