"""Adding up the gradients of several backward passes before they are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.gradients import Slot
from ringlet.shared.sparse_rows import summed


def check_passes(passes: int) -> None:
    """Raise TypeError or ValueError unless ``passes`` is a possible backward_passes_per_step."""
    if isinstance(passes, bool) or not isinstance(passes, int):
        raise TypeError(f"backward_passes_per_step is a whole number, not {passes!r}")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


class Accumulator:
    """Sums, or averages, the gradients of ``passes`` backward passes on this rank."""

    def __init__(self, passes: int, average: bool = False) -> None:
        check_passes(passes)
        self.passes, self._average = passes, average
        self._sums: dict[str, tuple[Array, ...]] = {}
        self._count = 0

    def add(self, slots: Sequence[Slot], arrays: Sequence[Array]) -> list[Array] | None:
        """Add one pass's gradients; return the sums after the last pass, None before it.

        16-bit gradients are added up in float32. A variable that only some passes use is one whose
        gradient is zero in the others; ValueError if a pass uses one that earlier ones did not.
        """
        if self.passes == 1:
            return list(arrays)
        given, kinds = iter(arrays), {}
        for slot in slots:
            parts = [next(given) for _ in range(slot.inputs)]
            kinds[slot.name] = slot
            self._sums[slot.name] = self._added(slot, parts)
        if kinds.keys() != self._sums.keys():
            odd = sorted(self._sums.keys() ^ kinds.keys())
            self.reset()
            raise ValueError(
                f"{odd[0]!r} has a gradient in some of {self.passes} backward passes only; with "
                "backward_passes_per_step the same variables must have gradients in each"
            )
        self._count += 1
        if self._count < self.passes:
            return None
        divisor = self.passes if self._average else 1
        result: list[Array] = []
        for slot in slots:
            values, *rest = self._sums[slot.name]
            if divisor > 1:
                values = values / values.dtype.type(divisor)
            result += [values.astype(numpy_dtype(slot.dtype), copy=False), *rest]
        self.reset()
        return result

    def reset(self) -> None:
        """Forget what was added up so far."""
        self._sums, self._count = {}, 0

    def _added(self, slot: Slot, parts: Sequence[Array]) -> tuple[Array, ...]:
        values = parts[0].astype(np.float32) if parts[0].dtype.itemsize == 2 else parts[0]
        held = self._sums.get(slot.name)
        if held is None:  # a copy: the array given is the framework's
            return (values.copy(), *(part.copy() for part in parts[1:]))
        if not slot.sparse:
            np.add(held[0], values, out=held[0])
            return held
        rows = np.concatenate([held[0], values])
        return summed(rows, np.concatenate([held[1], parts[1]]))
