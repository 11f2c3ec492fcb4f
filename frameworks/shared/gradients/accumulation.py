"""Adding up the gradients of several backward passes before they are reduced.

For frameworks whose gradients are values. torch adds up in ``p.grad`` by itself, so that
passes are only counted there (``ringlet.torch.optimizer.backward_passes``).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ringlet.ring.dtypes import Array
from ringlet.shared.argument_kinds import whole
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.gradients.gradient_settings import CommonValue, Slot
from ringlet.shared.gradients.pending_passes import (
    Pending,
    agreed,
    other_number,
    warn_of_misfits,
)
from ringlet.shared.gradients.sparse_rows import densified, summed
from ringlet.shared.variable_names import alike


def check_passes(passes: Any) -> int:
    """Return ``passes``; TypeError or ValueError for no possible backward_passes_per_step."""
    count = whole(passes, "backward_passes_per_step")
    if count < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {count}")
    return count


class Accumulator:
    """Sums, or averages, the gradients of ``passes`` backward passes on this rank."""

    def __init__(self, passes: int, average: bool = False) -> None:
        self.passes, self._average = check_passes(passes), average
        self._sums: dict[str, tuple[Slot, tuple[Array, ...]]] = {}
        self._count = 0
        self._resumed = 0  # passes of a checkpoint, or of an optimizer that is wrapped again
        self._foreign: set[str] = set()  # names of their sums, before variables have come to them
        self._misfits: list[str] = []

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
        self._match(slots, names)
        for slot in slots:
            parts = [next(given) for _ in range(slot.inputs)]
            self._sums[slot.name] = slot, self._added(slot, parts)
        self._count += 1
        if self._count < self.passes:
            return None
        for name in self._foreign:  # of no variable that is here
            del self._sums[name]
        warn_of_misfits([*self._misfits, *self._foreign])
        divisor = self.passes if self._average else 1
        early = [slot for slot, _ in self._sums.values() if slot.name not in names]
        every = [*slots, *[replace(slot, early=True) for slot in early]]
        result: list[Array] = []
        for slot in every:
            values, *rest = self._sums[slot.name][1]
            if divisor > 1:
                values = values / values.dtype.type(divisor)
            result += [values.astype(numpy_dtype(slot.dtype), copy=False), *rest]
        self._clear()
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
        self._clear()
        self._resumed = 0

    def pending(self) -> Pending:
        """Return a copy of what was added up so far."""
        sums = {
            name: (slot, tuple(part.copy() for part in parts))
            for name, (slot, parts) in self._sums.items()
        }
        return Pending(self.passes, self._count, sums)

    def go_on(self, pending: Pending) -> str:
        """Go on with what is ``pending``, or with nothing where steps have other numbers of passes.

        Returns why, in words, where something is forgotten. Sums go to variables that are called
        alike; the last pass warns of those that fit none.
        """
        self.reset()
        if pending.count and pending.passes != self.passes:
            return other_number(pending, self.passes)
        self._sums, self._count = dict(pending.sums), pending.count
        self._resumed, self._foreign = pending.count, set(pending.sums)
        return ""

    def agreed(self) -> CommonValue | None:
        """Return what ranks have to have in common in a step, if it has several passes."""
        return None if self.passes == 1 else agreed(self._resumed)

    def _clear(self) -> None:
        self._sums, self._count = {}, 0
        self._foreign, self._misfits = set(), []

    def _match(self, slots: Sequence[Slot], names: Container[str]) -> None:
        """Give sums that were begun elsewhere to the variables of ``slots`` that they are of."""
        for slot in slots if self._foreign else ():
            near = [slot.name] if slot.name in self._foreign else []
            if slot.name not in self._sums:
                near = [n for n in self._foreign if n not in names and alike(n, slot.name)]
            if len(near) != 1:
                continue
            self._foreign.discard(near[0])
            before, held = self._sums.pop(near[0])
            if (before.dtype, before.shape) == (slot.dtype, slot.shape):
                self._sums[slot.name] = before, held
            else:
                self._misfits.append(near[0])

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
