"""Launches of ``products.cuh``: products of factors; those with the matrix are cuBLAS's."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_shapes
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

_ROWS = 4  # rows that a thread does of a product, beside eight columns
_PRODUCT = np.dtype(
    [
        ("left", "u8"), ("right", "u8"), ("own_left", "u8"), ("own_right", "u8"),
        ("poison", "u8"), ("target", "u8"), ("out", "u8"), ("residual", "u8"), ("n", "i8"),
        ("m", "i8"), ("r", "i4"), ("unused", "i4"),
    ]
)  # fmt: skip
PRODUCT = Program(
    ("runtime/launch_table", "runtime/values", "lowrank/products"),
    ("product", "product_and_lost"),
    (("BITS", 8), ("INPUT", 0)),
)


def product(
    device: Device, left: Array, right: Array, poison: Array, out: Array, **lost: Array
) -> None:
    """Fill ``out`` (n x m) with (left + poison)^T right, of r x n and r x m.

    With ``own_left``, ``own_right``, ``target`` and ``residual``, set residual = target - (own_left
    + poison)^T own_right where that and ``out`` are finite, in the same pass.
    """
    shapes = {"left": (len(left), len(out)), "right": (len(left), out.shape[1])}
    shapes |= {f"own_{side}": shape for side, shape in shapes.items()}
    for name, array in {"left": left, "right": right, **lost}.items():
        check_shapes("a product", **{name: (array, shapes.get(name, out.shape))})
    table = np.zeros(1, _PRODUCT)
    table["n"], table["m"], table["r"] = *out.shape, len(left)
    arrays = {"left": left, "right": right, "poison": poison, "out": out, **lost}
    for name, array in arrays.items():
        table[name] = device.address(array)
    n, m = out.shape
    units = -(-n // _ROWS) * -(-m // 8)
    if units:
        kernel = "product_and_lost" if lost else "product"
        device.launch(PRODUCT, kernel, -(-units // THREADS), table)
