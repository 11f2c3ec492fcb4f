"""Launches of ``select.cuh``: the k entries of largest magnitude of many tensors at once.

Twelve launches for up to 32 tensors, of which three read memory in full (two of them in strides);
the host learns nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.context import Array
from ringlet.compressors.kernels.cuda import table as tables
from ringlet.compressors.kernels.cuda.bucketed import INPUTS
from ringlet.compressors.kernels.cuda.device import Device
from ringlet.compressors.kernels.cuda.source import Program

UNIT = 4096
TOGETHER = 64
STATE = 4 + 2048  # words
KERNELS = (
    "sample", "collect", "widen", "tally", "narrow", "rank", "order", "emit",
)  # fmt: skip
SELECTION = np.dtype(
    [
        ("table", tables.TABLE), ("offsets", "u8"), ("values", "u8"), ("counts", "u8"),
        ("places", "u8"), ("states", "u8"),
    ]
)  # fmt: skip
Scratch = Callable[[str, int, npt.DTypeLike], Array]


class Selected(NamedTuple):
    """One tensor: where its entries come from, and where they go to.

    ``x`` is flat: float32, float16, or bfloat16 as uint16; ``indices`` (uint32) and ``values``
    (float32) have k elements, k at least 1; ``residual`` (float32) is used with feedback.
    """

    x: Array
    indices: Array
    values: Array
    residual: Array | None = None


def largest(
    device: Device,
    tensors: Sequence[Selected],
    scratch: Scratch,
    decay: float = 1.0,
    scale: float = 1.0,
    flag: Array | None = None,
) -> None:
    """Select from scale * x, or with residuals from scale * x + decay * residual.

    That sum becomes the residual where it is finite; what is sent and finite is zeroed there. All
    tensors have a residual or none, and one input dtype. ``scratch(name, n, dtype)`` returns
    uninitialised device memory. ``flag`` (int32, one element) becomes 1 where something sent is
    not finite.
    """
    tensors = [tensor for tensor in tensors if tensor.x.size]
    for start in range(0, len(tensors), tables.MOST_SEGMENTS):
        _select(device, tensors[start : start + tables.MOST_SEGMENTS], scratch, decay, scale, flag)


def program(input_: int, feedback: int) -> Program:
    """Return the program for an input dtype (see ``bucketed``), with feedback or without."""
    constants = (("BITS", 8), ("GROUP", 32), ("INPUT", input_), ("FEEDBACK", feedback))
    return Program(("table", "values", "scan", "select"), KERNELS, constants)


def _select(
    device: Device,
    tensors: Sequence[Selected],
    scratch: Scratch,
    decay: float,
    scale: float,
    flag: Array | None,
) -> None:
    if not tensors:
        return
    by_unit, by_group = np.zeros(1, SELECTION), np.zeros(1, SELECTION)
    units = groups = 0
    for i, (x, indices, values, residual) in enumerate(tensors):
        kept = 0 if residual is None else device.address(residual)
        for table, first in (by_unit, units), (by_group, groups):
            row = (device.address(x), kept, x.size, first, values.size, units)
            table["table"]["segments"][0, i] = row
            table["table"]["parts"][0, i] = (device.address(indices), device.address(values), 0)
        units += -(-x.size // UNIT)
        groups += -(-x.size // (UNIT * TOGETHER))
    names = {
        "offsets": (units * UNIT, np.uint16), "values": (units * UNIT, np.float32),
        "counts": (units, np.uint32), "places": (2 * units, np.uint32),
        "states": (len(tensors) * STATE, np.uint32),
    }  # fmt: skip
    memory = {name: scratch(f"select {name}", n, dtype) for name, (n, dtype) in names.items()}
    for table, total in (by_unit, units), (by_group, groups):
        for name, array in memory.items():
            table[name] = device.address(array)
        inner = table["table"]
        inner["count"], inner["units"] = len(tensors), total
        inner["decay"], inner["scale"] = decay, scale
        inner["flag"] = 0 if flag is None else device.address(flag)
    code = program(INPUTS[tensors[0].x.dtype.name], int(tensors[0].residual is not None))

    def launch(kernel: str, blocks: int, table: npt.NDArray[np.void]) -> None:
        device.launch(code, kernel, blocks, table)

    launch("sample", len(tensors), by_unit)
    launch("collect", units, by_unit)
    launch("widen", units, by_unit)
    for level in range(3):
        by_group["table"]["shards"] = level
        launch("tally", groups, by_group)
        launch("narrow", len(tensors), by_group)
    launch("rank", groups, by_group)
    launch("order", len(tensors), by_group)
    launch("emit", groups, by_group)
