"""Launches of ``state_updates.cuh``: what EF21 and momentum correction remember."""

from __future__ import annotations

from collections.abc import Sequence

from ringlet.compressors.kernels.cuda.common.operands import (
    MOST,
    UNIT,
    Operands,
    input_of,
    table_of,
)  # fmt: skip
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program


def run(
    device: Device,
    kernel: str,
    tensors: Sequence[Operands],
    momentum: float = 0.0,
    masking: bool = False,
) -> None:
    """Run a kernel on tensors of one input dtype, 64 of them a launch.

    "differ": out = x - other, or kept + x - other. "commit": EF21's kept += x and other += out, out
    becomes that. "advance": out = momentum * kept + bound * x, or x. "settle": kept = x, with
    ``masking`` zero where other is not. What is not finite is never remembered.
    """
    for start in range(0, len(tensors), MOST):
        some = tensors[start : start + MOST]
        table, units = table_of(device, some, UNIT)
        table["momentum"], table["masking"] = momentum, masking
        if units:
            device.launch(program(input_of(some)), kernel, -(-units // THREADS), table)


def program(input_: int) -> Program:
    """Return the program for an input dtype (see ``bucketed``)."""
    parts = ("runtime/launch_table", "runtime/values", "common/operands", "modifiers/state_updates")
    kernels = ("differ", "commit", "advance", "settle")
    return Program(parts, kernels, (("BITS", 8), ("INPUT", input_)))
