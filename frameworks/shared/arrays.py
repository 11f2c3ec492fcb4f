"""Arrays as frameworks hand them over, and the flat ones that the engine moves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ringlet.ring.dtypes import Array

DTYPES = (
    "float16", "bfloat16", "float32", "float64",
    "uint8", "int8", "int16", "int32", "int64", "bool",
)  # fmt: skip
ALIGNMENT = 64  # what TensorFlow needs to take an array over without a copy


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name; bfloat16 is the one of ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes

        wide: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return wide
    return np.dtype(dtype)


def flat(array: Array) -> Array:
    """Return an array's memory as a flat one; bfloat16 as uint16. Copies only what has gaps."""
    plain = np.ascontiguousarray(array).reshape(-1)
    return plain.view(np.uint16) if plain.dtype.name == "bfloat16" else plain


def shaped(array: Array, dtype: str, shape: Sequence[int]) -> Array:
    """Return a flat array of the engine's as one of ``dtype`` (by name) and ``shape``."""
    typed = array.view(numpy_dtype(dtype)) if dtype == "bfloat16" else array
    return typed.reshape(tuple(shape))


def all_finite(array: Array) -> bool:
    """Whether an array of floating-point numbers holds no Inf and no NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum writes nothing and meets every Inf and NaN; finite numbers may add up to Inf.
        total = array.sum(dtype=np.float64 if array.itemsize == 8 else np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def allocate(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Array]:
    """Return uninitialised arrays in one piece of memory, aligned so that nobody has to copy."""
    kinds = [numpy_dtype(dtype) for dtype in dtypes]
    sizes = [kind.itemsize * prod(shape) for kind, shape in zip(kinds, shapes, strict=True)]
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    memory = np.empty(sum(padded) + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    arrays = []
    for kind, shape, size, step in zip(kinds, shapes, sizes, padded, strict=True):
        arrays.append(memory[start : start + size].view(kind).reshape(tuple(shape)))
        start += step
    return arrays
