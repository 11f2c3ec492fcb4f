"""Launches of ``hadamard.cuh``: the rotation and its inverse, one pass over memory each."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

LARGEST = 8192  # elements of a block that shared memory holds on every GPU

_ROTATION = np.dtype(
    [
        ("x", "u8"), ("out", "u8"), ("n", "i8"), ("key", "u8"), ("start", "u8"),
        ("adding", "i4"), ("unused", "i4"),
    ]
)  # fmt: skip


def program(block: int) -> Program:
    """Return the program for blocks of this size."""
    return Program(
        ("modifiers/hadamard",), ("rotate", "restore"), (("BLOCK", block),), min(THREADS, block)
    )


def run(
    device: Device, kernel: str, x: Array, out: Array, block: int, key: int, start: int,
    add: bool = False,
) -> None:  # fmt: skip
    """Fill ``out`` with ``x`` after "rotate" or "restore" (both flat float32), or ``add`` that.

    May work in place. ``block`` is at most LARGEST; ``start`` is the place of x[0] in its tensor.
    """
    check_lengths("hadamard", x.size, out=out)
    if x.size == 0:
        return
    table = np.zeros(1, _ROTATION)
    table["x"], table["out"], table["n"] = device.address(x), device.address(out), x.size
    table["key"], table["start"], table["adding"] = key, start, int(add)
    device.launch(program(block), kernel, -(-x.size // block), table)
