"""Launches of ``memory.cuh`` and ``norm.cuh``: what modifiers do to whole tensors, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS
from ringlet.compressors.kernels.cuda.common.candidates import Scratch
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

CHUNK = 1 << 16  # elements that are summed in one piece
MOST = 64  # tensors of a launch
_EACH = 8  # elements of a thread
_MEMORY = np.dtype(
    [
        ("x", "u8"), ("kept", "u8"), ("other", "u8"), ("out", "u8"), ("bound", "u8"), ("n", "i8"),
        ("first", "i8"),
    ]
)  # fmt: skip
_MEMORIES = np.dtype(
    [
        ("tensors", _MEMORY, MOST), ("sums", "u8"), ("clip", "f8"), ("units", "i8"),
        ("count", "i4"), ("masking", "i4"), ("momentum", "f4"), ("unused", "i4"),
    ]
)  # fmt: skip


class Memory(NamedTuple):
    """One tensor: flat arrays of as many elements as ``x``, float32.

    ``x`` may be float16, or bfloat16 as uint16, where it is a gradient; ``bound`` (float32) is of
    one element.
    """

    x: Array
    kept: Array | None = None
    other: Array | None = None
    out: Array | None = None
    bound: Array | None = None


def run(
    device: Device,
    kernel: str,
    tensors: Sequence[Memory],
    momentum: float = 0.0,
    masking: bool = False,
) -> None:
    """Run a kernel on tensors of one input dtype, 64 of them a launch.

    "differ": out = x - other, or kept + x - other. "commit": EF21's kept += x and other += out, out
    becomes that. "advance": out = momentum * kept + bound * x, or x. "settle": kept = x, with
    ``masking`` zero where other is not. What is not finite is never remembered. "clip": out = x,
    no larger than bound.
    """
    for start in range(0, len(tensors), MOST):
        some = tensors[start : start + MOST]
        table, units = _table(device, some, _EACH)
        table["momentum"], table["masking"] = momentum, masking
        if units:
            code = program("norm" if kernel == "clip" else "memory", _input(some))
            device.launch(code, kernel, -(-units // THREADS), table)


def bounds(
    device: Device, kernel: str, tensors: Sequence[Memory], clip: float, scratch: Scratch
) -> None:
    """Set each tensor's ``bound``, without the host, in two launches for 64 tensors.

    "shrink": the factor that makes the norm at most ``clip``, 1 where it is not finite. "limit":
    ``clip`` root mean squares, Inf where that is not finite. No tensor is empty.
    """
    for start in range(0, len(tensors), MOST):
        some = tensors[start : start + MOST]
        table, chunks = _table(device, some, CHUNK)
        sums = scratch("norm sums", chunks, np.float64)  # held until the launches
        table["sums"], table["clip"] = device.address(sums), clip
        code = program("norm", _input(some))
        device.launch(code, "square", chunks, table)
        device.launch(code, kernel, len(some), table)


def program(name: str, input_: int) -> Program:
    """Return the program "memory" or "norm" for an input dtype (see ``bucketed``)."""
    kernels = {
        "memory": ("differ", "commit", "advance", "settle"),
        "norm": ("square", "shrink", "limit", "clip"),
    }[name]
    chunks = ("chunks",) if name == "norm" else ()
    parts = ("table", "values", *chunks, "memories", name)
    return Program(parts, kernels, (("BITS", 8), ("INPUT", input_)))


def _table(
    device: Device, tensors: Sequence[Memory], elements: int
) -> tuple[npt.NDArray[np.void], int]:
    """Return the table, and how many units of so many elements each there are."""
    table, first = np.zeros(1, _MEMORIES), 0
    for i, memory in enumerate(tensors):
        each = memory._asdict()
        check_lengths("a bound", 1, bound=each.pop("bound"))
        check_lengths("a memory", memory.x.size, **each)
        addresses = [0 if array is None else device.address(array) for array in memory]
        table["tensors"][0, i] = (*addresses, memory.x.size, first)
        first += -(-memory.x.size // elements)
    table["count"], table["units"] = len(tensors), first
    return table, first


def _input(tensors: Sequence[Memory]) -> int:
    return INPUTS[tensors[0].x.dtype.name]
