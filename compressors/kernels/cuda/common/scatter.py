"""Launches of ``scatter.cuh``: sums of sparse payloads, of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

MOST = 32  # tensors of a launch
_SCATTERED = np.dtype(
    [
        ("out", "u8"), ("indices", "u8"), ("values", "u8"), ("n", "i8"), ("entries", "i8"),
        ("first", "i8"), ("begin", "i8"),
    ]
)  # fmt: skip
_SCATTERING = np.dtype(
    [
        ("tensors", _SCATTERED, MOST), ("units", "i8"), ("entries", "i8"), ("count", "i4"),
        ("scale", "f4"),
    ]
)  # fmt: skip
KERNELS = ("clear", "put", "add", "scale")
PROGRAM = Program(
    ("runtime/launch_table", "runtime/values", "common/scatter"),
    KERNELS,
    (("BITS", 8), ("INPUT", 0)),
)
_EACH = 8  # elements of a thread


class Entries(NamedTuple):
    """One payload: the addresses of its indices (uint32) and values (float32), how many."""

    indices: int
    values: int
    size: int


class Sparse(NamedTuple):
    """One output (flat float32), and the payloads whose sum it becomes, in order."""

    out: Array
    payloads: Sequence[Entries]


def sums(device: Device, tensors: Sequence[Sparse], scale: float = 1.0) -> None:
    """Overwrite outputs with scale * the sum of their payloads, of which all have equally many.

    For up to 32 tensors a launch to clear, one for each payload, and one where ``scale`` is not 1.
    """
    for start in range(0, len(tensors), MOST):
        some = tensors[start : start + MOST]
        table, units = _table(device, [out for out, _ in some], scale)
        mine = table["tensors"][0, : len(some)]
        _launch(device, "clear", units, table)
        for p in range(len(some[0].payloads)):
            payloads = np.array([tensor.payloads[p] for tensor in some], np.uint64)
            mine["indices"], mine["values"], mine["entries"] = payloads.T
            ends = np.cumsum(mine["entries"])
            mine["begin"], table["entries"] = ends - mine["entries"], ends[-1]
            _launch(device, "add" if p else "put", int(ends[-1]), table)
        if scale != 1.0:
            _launch(device, "scale", units, table)


def multiply(device: Device, outs: Sequence[Array], scale: float) -> None:
    """Multiply flat float32 arrays by ``scale``, 32 of them a launch."""
    for start in range(0, len(outs), MOST):
        table, units = _table(device, outs[start : start + MOST], scale)
        _launch(device, "scale", units, table)


def _table(device: Device, outs: Sequence[Array], scale: float) -> tuple[npt.NDArray[Any], int]:
    """Return a table of outputs, and how many eights of elements they have."""
    table, rows, units = np.zeros(1, _SCATTERING), [], 0
    for out in outs:
        rows.append((device.address(out), 0, 0, out.size, 0, units, 0))
        units += -(-out.size // _EACH)
    table["tensors"][0, : len(outs)] = np.array(rows, _SCATTERED)
    table["count"], table["units"], table["scale"] = len(outs), units, scale
    return table, units


def _launch(device: Device, kernel: str, threads: int, table: npt.NDArray[Any]) -> None:
    if threads:
        device.launch(PROGRAM, kernel, -(-threads // THREADS), table)
