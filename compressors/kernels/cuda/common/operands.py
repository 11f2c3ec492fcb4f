"""The table of ``operands.cuh``: tensors, each with up to four arrays beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS
from ringlet.compressors.kernels.cuda.runtime.device import Device

MOST = 64  # tensors of a launch
UNIT = 8  # elements of a thread
_OPERANDS = np.dtype(
    [
        ("x", "u8"), ("kept", "u8"), ("other", "u8"), ("out", "u8"), ("bound", "u8"), ("n", "i8"),
        ("first", "i8"),
    ]
)  # fmt: skip
_TABLE = np.dtype(
    [
        ("tensors", _OPERANDS, MOST), ("sums", "u8"), ("clip", "f8"), ("units", "i8"),
        ("count", "i4"), ("masking", "i4"), ("momentum", "f4"), ("unused", "i4"),
    ]
)  # fmt: skip


class Operands(NamedTuple):
    """One tensor: flat arrays of as many elements as ``x``, float32.

    ``x`` may be float16, or bfloat16 as uint16, where it is a gradient; ``bound`` (float32) is of
    one element.
    """

    x: Array
    kept: Array | None = None
    other: Array | None = None
    out: Array | None = None
    bound: Array | None = None


def table_of(
    device: Device, tensors: Sequence[Operands], elements: int
) -> tuple[npt.NDArray[np.void], int]:
    """Return the table, and how many units of so many elements each there are."""
    table, first = np.zeros(1, _TABLE), 0
    for i, tensor in enumerate(tensors):
        each = tensor._asdict()
        check_lengths("a bound", 1, bound=each.pop("bound"))
        check_lengths("a memory", tensor.x.size, **each)
        addresses = [0 if array is None else device.address(array) for array in tensor]
        table["tensors"][0, i] = (*addresses, tensor.x.size, first)
        first += -(-tensor.x.size // elements)
    table["count"], table["units"] = len(tensors), first
    return table, first


def input_of(tensors: Sequence[Operands]) -> int:
    """Return the input dtype of tensors, as constant INPUT."""
    return INPUTS[tensors[0].x.dtype.name]
