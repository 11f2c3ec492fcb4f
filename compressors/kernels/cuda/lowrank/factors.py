"""Launches of ``factors.cuh``: orthonormal bases, and what the next step begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_shapes
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.source import Program

MOST = 64  # matrices of a launch
_BASIS = np.dtype(
    [
        ("rows", "u8"), ("add", "u8"), ("out", "u8"), ("poison", "u8"), ("room", "u8"), ("n", "i8"),
        ("r", "i4"), ("unused", "i4"),
    ]
)  # fmt: skip
_BASES = np.dtype([("bases", _BASIS, MOST), ("small", "f8"), ("count", "i4"), ("unused", "i4")])
_CONSTANTS = (("BITS", 8), ("INPUT", 0))
ORTHONORMAL = Program(
    ("runtime/launch_table", "runtime/values", "runtime/scan", "lowrank/factors"),
    ("orthonormal", "inspect", "keep"),
    _CONSTANTS,
    512,
)


class Rows(NamedTuple):
    """One matrix of few rows (float32, r x n), and where its result goes.

    ``out`` is a matrix of the same shape, ``poison`` one float32, ``add`` one that is added to it.
    """

    rows: Array
    out: Array | None = None
    poison: Array | None = None
    add: Array | None = None


def orthonormal(device: Device, matrices: Sequence[Rows], small: float, scratch: Scratch) -> None:
    """Fill each ``out`` with an orthonormal basis of the rows; what is not finite counts as 0.

    A row of which less than ``small`` is left beside those before gives way to a unit vector.
    ``out`` may be ``rows``.
    """
    for start in range(0, len(matrices), MOST):
        some = matrices[start : start + MOST]
        table, places, end = _table(device, some), [], 0
        for rows, *_ in some:
            r, n = rows.shape
            places.append(end)
            end += r * n + r * ((n + 1) // 2) + r
        room = scratch("orthonormal", end, np.float64)  # held until the launch
        first = device.address(room)
        table["bases"]["room"][0, : len(some)] = [first + 8 * place for place in places]
        table["small"] = small
        device.launch(ORTHONORMAL, "orthonormal", len(some), table)


def inspect(device: Device, matrices: Sequence[Rows]) -> None:
    """Set each ``poison`` to 0, or NaN where a value is not finite, plus ``add``."""
    for start in range(0, len(matrices), MOST):
        some = matrices[start : start + MOST]
        device.launch(ORTHONORMAL, "inspect", len(some), _table(device, some))


def keep(device: Device, matrices: Sequence[Rows]) -> None:
    """Set each ``out`` to the rows, scaled to a largest magnitude of 1; rows of zeros are not kept.

    Nothing changes where ``poison`` is not finite. All matrices have equally many rows.
    """
    for start in range(0, len(matrices), MOST):
        some = matrices[start : start + MOST]
        blocks = sum(rows.shape[0] for rows, *_ in some)
        device.launch(ORTHONORMAL, "keep", blocks, _table(device, some))


def _table(device: Device, matrices: Sequence[Rows]) -> npt.NDArray[np.void]:
    table = np.zeros(1, _BASES)
    for i, (rows, out, poison, add) in enumerate(matrices):
        arrays = {"rows": rows, "out": out, "poison": poison, "add": add}
        if out is not None:
            check_shapes("a factor", out=(out, rows.shape))
        for name, array in arrays.items():
            table["bases"][name][0, i] = 0 if array is None else device.address(array)
        table["bases"]["r"][0, i], table["bases"]["n"][0, i] = rows.shape
    table["count"] = len(matrices)
    return table
