"""Element types by name, as they travel.

A dtype is named by a string because NumPy has no bfloat16: such arrays are ``uint16`` in memory
and carry the name ``"bfloat16"`` beside them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool")
NAMES = FLOATS + INTEGERS


STORED = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in NAMES}


def storage(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds elements of dtype ``name`` in memory."""
    try:
        return STORED[name]
    except KeyError:
        listed = ", ".join(NAMES)
        raise TypeError(f"dtype {name!r} cannot travel; dtypes that can: {listed}") from None


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # NumPy composes it afresh every time


def dtype_name(array: Array, dtype: str | None = None) -> str:
    """Return the name of ``array``'s dtype; ``dtype`` overrides it for bfloat16 held as uint16."""
    name = dtype or _name_of(array.dtype)
    if storage(name) != array.dtype:
        raise TypeError(f"an array of {array.dtype} cannot hold elements of {name!r}")
    return name
