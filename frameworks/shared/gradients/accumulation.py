"""Adding up the gradients of several backward passes before they are reduced.

For frameworks whose gradients are values. torch adds up in ``p.grad`` by itself, so its reducer
counts passes only (``ringlet.torch.optimizer.reducer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.gradients.gradient_settings import Slot
from ringlet.shared.gradients.sparse_rows import densified, summed


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
        self._sums: dict[str, tuple[Slot, tuple[Array, ...]]] = {}
        self._count = 0

    @np.errstate(over="ignore", invalid="ignore")  # a loss scale takes care of both
    def add(
        self, slots: Sequence[Slot], arrays: Sequence[Array]
    ) -> tuple[list[Slot], list[Array]] | None:
        """Add one pass's gradients; return what is to be reduced after the last, None before it.

        16-bit gradients are added up in float32. A variable that only some passes use is one whose
        gradient is zero in the others. One that the last pass does not use stands behind the rest:
        see ``refuse_unused``.
        """
        if self.passes == 1:
            return list(slots), list(arrays)
        given, names = iter(arrays), {slot.name for slot in slots}
        for slot in slots:
            parts = [next(given) for _ in range(slot.inputs)]
            self._sums[slot.name] = slot, self._added(slot, parts)
        self._count += 1
        if self._count < self.passes:
            return None
        divisor = self.passes if self._average else 1
        early = [slot for slot, _ in self._sums.values() if slot.name not in names]
        every = [*slots, *[replace(slot, early=True) for slot in early]]
        result: list[Array] = []
        for slot in every:
            values, *rest = self._sums[slot.name][1]
            if divisor > 1:
                values = values / values.dtype.type(divisor)
            result += [values.astype(numpy_dtype(slot.dtype), copy=False), *rest]
        self.reset()
        return every, result

    def refuse_unused(self, slots: Sequence[Slot], every: Sequence[Slot]) -> None:
        """Raise ValueError unless the last pass, that of ``slots``, used ``every`` variable.

        After they were reduced, so that all ranks raise it: another one hears of the difference.
        """
        if len(every) > len(slots):
            name = every[len(slots)].name
            raise ValueError(
                f"{name!r} has a gradient in earlier ones of {self.passes} backward passes, and "
                "none in the last one, which applies them: use it there too, or add a term that is "
                "zero, such as 0.0 * keras.ops.sum(variable)"
            )

    def reset(self) -> None:
        """Forget what was added up so far."""
        self._sums, self._count = {}, 0

    def _added(self, slot: Slot, parts: Sequence[Array]) -> tuple[Array, ...]:
        values = parts[0].astype(np.float32) if parts[0].dtype.itemsize == 2 else parts[0]
        if slot.name not in self._sums:  # a copy: the array given is the framework's
            # Nor a number, which has no room for a sum: graphs hand in scalars as such.
            return (np.array(values), *(part.copy() for part in parts[1:]))
        before, held = self._sums[slot.name]
        if before.sparse != slot.sparse:  # a table that only some passes use as a whole
            held = _as_rows(held[0]) if slot.sparse else _as_table(held, slot.shape)
        if not slot.sparse:
            np.add(held[0], values, out=held[0])
            return held
        rows = np.concatenate([held[0], values])
        return summed(rows, np.concatenate([held[1], parts[1]]))


def _as_rows(table: Array) -> tuple[Array, Array]:
    return table, np.arange(len(table))


def _as_table(held: tuple[Array, ...], shape: tuple[int, ...]) -> tuple[Array]:
    rows, indices = held
    table = np.empty(shape, rows.dtype)
    densified(rows, indices, table)
    return (table,)
