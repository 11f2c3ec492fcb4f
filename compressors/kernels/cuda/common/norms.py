"""Launches of ``norms.cuh``: norms of whole tensors, and values clipped by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringlet.compressors.kernels.cuda.common.operands import (
    MOST,
    UNIT,
    Operands,
    input_of,
    table_of,
)  # fmt: skip
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

CHUNK = 1 << 16  # elements that are summed in one piece


def bounds(
    device: Device, kernel: str, tensors: Sequence[Operands], clip: float, scratch: Scratch
) -> None:
    """Set each tensor's ``bound``, without the host, in two launches for 64 tensors.

    "shrink": the factor that makes the norm at most ``clip``, 1 where it is not finite. "limit":
    ``clip`` root mean squares, Inf where that is not finite. No tensor is empty.
    """
    for start in range(0, len(tensors), MOST):
        some = tensors[start : start + MOST]
        table, chunks = table_of(device, some, CHUNK)
        sums = scratch("norm sums", chunks, np.float64)  # held until the launches
        table["sums"], table["clip"] = device.address(sums), clip
        code = program(input_of(some))
        device.launch(code, "square", chunks, table)
        device.launch(code, kernel, len(some), table)


def clip(device: Device, tensors: Sequence[Operands]) -> None:
    """Set each ``out`` to ``x``, no larger than ``bound``, 64 tensors of one dtype a launch."""
    for start in range(0, len(tensors), MOST):
        some = tensors[start : start + MOST]
        table, units = table_of(device, some, UNIT)
        if units:
            device.launch(program(input_of(some)), "clip", -(-units // THREADS), table)


def program(input_: int) -> Program:
    """Return the program for an input dtype (see ``bucketed``)."""
    parts = (
        "runtime/launch_table", "runtime/values", "runtime/chunks", "common/operands",
        "common/norms",
    )  # fmt: skip
    return Program(parts, ("square", "shrink", "limit", "clip"), (("BITS", 8), ("INPUT", input_)))
