"""Steps of which nothing travels: of a rank alone, and those that are skipped for an overflow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringlet.ring.dtypes import FLOATS, Array
from ringlet.shared.arrays import all_finite, allocate
from ringlet.shared.gradients.gradient_settings import Settings, Slot
from ringlet.shared.gradients.sparse_rows import check_places, densified
from ringlet.shared.memory import Memory


def finite(arrays: Sequence[Array]) -> bool:
    """Whether no array of floats has an overflow."""
    return all(all_finite(array) for array in arrays if array.dtype.name in FLOATS)


def as_they_are(
    slots: Sequence[Slot],
    arrays: Sequence[Array],
    settings: Settings,
    outputs: Sequence[Array] | None = None,
) -> list[Array]:
    """Return gradients in the form of reduced ones: copies, or ``outputs``, which then hold them.

    ``arrays`` are one for each slot, or values and indices where it is sparse; so are the results,
    but one dense array where ``settings`` let a sparse gradient travel so.
    """
    if outputs is not None:
        for out, array in zip(outputs, arrays, strict=True):
            out[...] = array
        return list(outputs)
    results, given = [], iter(arrays)
    for slot in slots:
        parts = [next(given) for _ in range(slot.inputs)]
        if slot.sparse and settings.dense(slot):
            (out,) = allocate([slot.dtype], [slot.shape])
            densified(parts[0], parts[1], out)
            parts = [out]
        else:
            parts = [part.copy() for part in parts]  # what is given belongs to the framework
        results += parts
    return results


def overflowed(slots: Sequence[Slot], arrays: Sequence[Array], settings: Settings) -> list[Array]:
    """Return gradients that tell every rank's loss scaler to skip this step."""
    return [
        np.full_like(array, np.nan) if array.dtype.name in FLOATS else array
        for array in as_they_are(slots, arrays, settings)
    ]


def pay_back(
    slots: Sequence[Slot], results: Sequence[Array], settings: Settings, memory: Memory
) -> None:
    """Add what ranks held back of gradients to those of the one that is left: ``results``.

    Of a large table when a row is used. A step that is skipped for an overflow takes nothing along.
    """
    if not memory.states or (settings.guard and not finite(results)):
        return
    move_rows(slots, settings, memory)
    given, whole, by_row = iter(results), [], []
    for slot in slots:
        if settings.dense(slot):
            whole.append((slot.name, next(given)))
            continue
        values, indices = next(given), next(given)
        if memory.holds_rows(slot.name, slot.shape):
            check_places(indices, slot.shape[0], slot.name)  # before anything is taken
            by_row.append((slot.name, values, indices))
    for name, values, indices in by_row:
        places, first = np.unique(indices, return_index=True)  # a row may come several times
        rows = memory.take_rows(name, places)
        values[first] = (rows + values[first]).astype(values.dtype)
    held = memory.take_residuals({name for name, _ in whole})
    for name, out in whole:
        if name in held:
            owed = held[name].reshape(out.shape) * np.float32(settings.predivide)
            out[...] = (owed + out).astype(out.dtype)


def move_rows(slots: Sequence[Slot], settings: Settings, memory: Memory) -> None:
    """Let what is held back of tables be by row where their gradients now travel as rows."""
    for slot in slots:
        by_row = not settings.dense(slot)
        memory.move(slot.name, slot.shape, by_row, settings.process_set.size())
