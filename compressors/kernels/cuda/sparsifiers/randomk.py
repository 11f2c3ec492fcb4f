"""Launches of ``randomk.cuh``: draw, take, look for what is not finite, settle the residual."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

_DRAWING = np.dtype(
    [
        ("x", "u8"), ("residual", "u8"), ("values", "u8"), ("indices", "u8"), ("old", "u8"),
        ("broken", "u8"), ("n", "i8"), ("k", "i8"), ("key", "u8"), ("rows", "u8"),
        ("columns", "u8"), ("decay", "f4"), ("scale", "f4"),
    ]
)  # fmt: skip
KERNELS = ("draw", "take", "inspect", "settle")
PROGRAM = Program(
    ("runtime/launch_table", "runtime/values", "sparsifiers/randomk"),
    KERNELS,
    (("BITS", 8), ("INPUT", 0)),
)


def draw(device: Device, n: int, key: int, grid: tuple[int, int], indices: Array) -> None:
    """Fill ``indices`` (uint32) with where a permutation of 0 .. n - 1 sends 0, 1, 2, ..."""
    table = _table(device, n, key, grid, indices)
    _launch(device, "draw", indices.size, table)


def encode(
    device: Device, x: Array, residual: Array | None, decay: float, scale: float, values: Array,
    key: int, grid: tuple[int, int], scratch: Scratch,
) -> None:  # fmt: skip
    """Send scale * (x + decay * residual) of the entries drawn (flat float32); keep the rest.

    Where that sum is not finite anywhere, the first value becomes NaN and those residuals stay.
    """
    check_lengths("randomk", x.size, residual=residual)
    k = values.size
    indices = scratch("randomk", k, np.uint32)
    table = _table(device, x.size, key, grid, indices)
    table["x"], table["values"] = device.address(x), device.address(values)
    table["broken"] = device.address(scratch("randomk broken", 1, np.int32))
    table["decay"], table["scale"] = decay, scale
    if residual is not None:
        table["residual"] = device.address(residual)
        table["old"] = device.address(scratch("old", k, np.float32))
    _launch(device, "draw", k, table)
    _launch(device, "take", k, table)
    _launch(device, "inspect", -(-x.size // 8), table)
    _launch(device, "settle", k, table)


def _table(
    device: Device, n: int, key: int, grid: tuple[int, int], indices: Array
) -> npt.NDArray[np.void]:
    table = np.zeros(1, _DRAWING)
    table["n"], table["k"], table["key"] = n, indices.size, key
    table["rows"], table["columns"] = grid
    table["indices"] = device.address(indices)
    return table


def _launch(device: Device, kernel: str, work: int, table: npt.NDArray[np.void]) -> None:
    if work:
        device.launch(PROGRAM, kernel, -(-work // THREADS), table)
