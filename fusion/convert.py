"""Between a tensor's own dtype and the float32 that compressors see.

``scratch`` lies where the arrays do. On a GPU the casts are those of the compressors.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from ringlet.compressors import BF16, FP16, Context, Workspace
from ringlet.ring.dtypes import FLOATS, Array

_CASTS = {"float16": FP16(), "bfloat16": BF16()}


def to_float32(array: Array, dtype: str, scratch: Workspace, name: str = "widened") -> Array:
    """Return ``array`` (of ``dtype`` by name) as float32: itself, or a converted scratch copy."""
    if dtype == "float32":
        return array
    wide = scratch.array(name, array.size)
    if dtype in _CASTS and scratch.xp is not np:
        surroundings = Context(xp=scratch.xp, workspace=scratch)
        _CASTS[dtype].decompress({"values": array}, wide, surroundings)
    elif dtype in _CASTS:
        from ringlet.compressors.kernels import casts

        family = casts.f16 if dtype == "float16" else casts.bf16
        family[2](array.view(np.uint16), wide)
    else:
        wide[...] = array
    return wide


def from_float32(source: Array, out: Array, dtype: str, scratch: Workspace) -> None:
    """Write float32 ``source`` to ``out`` of ``dtype``, rounding to nearest even."""
    if dtype in _CASTS and scratch.xp is not np:
        surroundings = Context(xp=scratch.xp, workspace=scratch)
        _CASTS[dtype].encode_into(source, {"values": out}, surroundings)
    elif dtype in _CASTS:
        from ringlet.compressors.kernels import casts

        family = casts.f16 if dtype == "float16" else casts.bf16
        family[0](source, out.view(np.uint16))
    elif source is not out:
        out[...] = source


def scale_into(
    source: Array, factor: float, out: Array, dtype: str, scratch: Workspace, divisor: int = 1
) -> None:
    """Write ``source`` times ``factor`` over ``divisor`` to ``out``, both of ``dtype``.

    They may be one array. Integers are scaled in double precision and truncated toward zero;
    divided alone they are exact.
    """
    xp = scratch.xp
    if dtype in FLOATS:
        factor /= divisor
    elif divisor != 1 and factor == 1.0 and dtype != "bool":
        # CuPy computes the remainder of C's division in double precision, this one exactly.
        short = (source < 0) & (source % divisor != 0)
        xp.floor_divide(source, divisor, out=out)
        out += short.astype(out.dtype)
        return
    if factor == 1.0 and (divisor == 1 or dtype in FLOATS):
        if source is not out:
            out[...] = source
    elif dtype in ("float32", "float64"):
        xp.multiply(source, cast(np.generic, out.dtype.type(factor)), out=out)
    elif dtype in _CASTS:
        wide = to_float32(source, dtype, scratch, "scaled")
        wide *= np.float32(factor)
        from_float32(wide, out, dtype, scratch)
    else:
        out[...] = xp.trunc(source * factor / divisor).astype(out.dtype)
