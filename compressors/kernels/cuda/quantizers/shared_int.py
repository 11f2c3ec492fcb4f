"""Launches of ``shared_int.cuh``: measure the buckets, round to integers, decode their sums."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

_SHARING = np.dtype(
    [
        ("x", "u8"), ("extents", "u8"), ("codes", "u8"), ("out", "u8"), ("n", "i8"),
        ("key", "u8"), ("start", "u8"), ("levels", "f4"), ("unused", "i4"),
    ]
)  # fmt: skip
_TYPES = {8: "signed char", 16: "short", 32: "int"}
_GROUP = 32  # threads that measure a bucket
_EACH = 8  # elements of a thread


def program(bits: int, bucket: int, stochastic: bool) -> Program:
    """Return the program of these options."""
    constants = (
        ("CODE", _TYPES[bits]), ("BUCKET", bucket), ("STOCHASTIC", int(stochastic)),
        ("GROUP", _GROUP),
    )  # fmt: skip
    return Program(
        ("runtime/groups", "quantizers/shared_int"), ("measure", "encode", "decode"), constants
    )


def run(
    device: Device, code: Program, kernel: str, n: int, extents: Array, key: int = 0,
    start: int = 0, levels: float = 1.0, **arrays: Array,
) -> None:  # fmt: skip
    """Run ``kernel`` on n elements.

    "measure": ``extents`` (float32) from ``x``. "encode": ``codes`` from ``x`` and ``extents``, in
    ``levels`` of a sign; ``start`` is the counter of x[0]. "decode": ``out`` from ``codes`` and the
    units in ``extents``.
    """
    check_lengths(kernel, n, **arrays)
    if n == 0:
        return
    table = np.zeros(1, _SHARING)
    table["n"], table["key"], table["start"], table["levels"] = n, key, start, levels
    table["extents"] = device.address(extents)
    for name, array in arrays.items():
        table[name] = device.address(array)
    threads = extents.size * _GROUP if kernel == "measure" else -(-n // _EACH)
    device.launch(code, kernel, -(-threads // THREADS), table)
