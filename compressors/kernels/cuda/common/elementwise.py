"""Launches of ``elementwise.cuh``: residuals, votes and entries, one pass over memory each."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

_ARRAYS = np.dtype(
    [
        ("a", "u8"), ("b", "u8"), ("c", "u8"), ("out", "u8"), ("indices", "u8"), ("n", "i8"),
        ("entries", "i8"), ("weight", "f4"), ("turn", "i4"),
    ]
)  # fmt: skip
KERNELS = ("add", "scale", "keep", "keep_combined", "vote", "scatter", "scatter_add")
PROGRAM = Program(
    ("runtime/launch_table", "runtime/values", "common/elementwise"),
    KERNELS,
    (("BITS", 8), ("INPUT", 0)),
)


def run(
    device: Device, kernel: str, out: Array, weight: float = 1.0, turn: int = 0, **arrays: Array
) -> None:
    """Run ``kernel`` on flat float32 arrays of equal length.

    "add": out = a + weight * b. "scale": out = weight * out. "keep": out = a - b where that is
    finite. "keep_combined": the same where c is finite too. "vote": out = weight or -weight, by
    its sign; where it is 0, -weight if ``turn`` and the index add up to what is odd. "scatter" and
    "scatter_add": the entries a at ``indices`` (uint32), which do not repeat, in out.
    """
    entries = arrays.get("indices")
    check_lengths(kernel, out.size if entries is None else entries.size, **arrays)
    table = np.zeros(1, _ARRAYS)
    table["out"], table["n"] = device.address(out), out.size
    table["weight"], table["turn"] = weight, turn
    for name, array in arrays.items():
        table[name] = device.address(array)
    work = -(-out.size // 8)
    if "indices" in arrays:
        work = arrays["indices"].size
        table["entries"] = work
    if work and out.size:
        device.launch(PROGRAM, kernel, -(-work // THREADS), table)
