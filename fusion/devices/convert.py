"""Between a tensor's own dtype and the float32 that compressors see.

``scratch`` lies where the arrays do. On a GPU the casts are those of the compressors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from ringlet.compressors import BF16, FP16, Context, Workspace
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import FLOATS, Array

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cpu.dense.casts import Casts

_LONGER = dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32")
_LONGER |= dict.fromkeys(("int32", "uint32"), "int64")
_CASTS = {"float16": FP16(), "bfloat16": BF16()}


def combined_as(dtype: str, op: ReduceOp) -> str:
    """Return the dtype in which uncompressed tensors of ``dtype`` are combined by ``op``.

    A mean fits its dtype where the sum does not: short integers are added up in longer ones.
    """
    return _LONGER.get(dtype, dtype) if op is ReduceOp.AVERAGE else dtype


def to_float32(
    array: Array, dtype: str, scratch: Workspace, name: str = "widened", factor: float = 1.0
) -> Array:
    """Return ``factor`` times ``array`` (of ``dtype`` by name) in float32.

    The array itself where nothing is to be done, else a scratch copy.
    """
    if dtype == "float32" and factor == 1.0:
        return array
    wide = scratch.array(name, array.size)
    if dtype == "float32":
        scratch.xp.multiply(array, np.float32(factor), out=wide)
    elif dtype in _CASTS and scratch.xp is np:
        bits = array.view(np.uint16)
        if factor == 1.0:
            _kernels(dtype).decode(bits, wide)
        else:
            _kernels(dtype).widen(bits, np.float32(factor), wide)
    else:
        if dtype in _CASTS:
            surroundings = Context(xp=scratch.xp, workspace=scratch)
            _CASTS[dtype].decompress({"values": array}, wide, surroundings)
        else:
            wide[...] = array
        if factor != 1.0:
            scratch.xp.multiply(wide, np.float32(factor), out=wide)
    return wide


def from_float32(
    source: Array, out: Array, dtype: str, scratch: Workspace, factor: float = 1.0
) -> None:
    """Write ``factor`` times float32 ``source`` to ``out`` of ``dtype``, rounding to nearest even.

    ``source`` may be overwritten.
    """
    if dtype in _CASTS and scratch.xp is np:
        bits = out.view(np.uint16)
        if factor == 1.0:
            _kernels(dtype).encode(source, bits)
        else:
            _kernels(dtype).narrow(source, np.float32(factor), bits)
        return
    if factor != 1.0:
        target = out if dtype == "float32" else source
        scratch.xp.multiply(source, np.float32(factor), out=target)
        source = target
    if dtype in _CASTS:
        surroundings = Context(xp=scratch.xp, workspace=scratch)
        _CASTS[dtype].encode_into(source, {"values": out}, surroundings)
    elif source is not out:
        out[...] = source


def scale_into(
    source: Array, factor: float, out: Array, dtype: str, scratch: Workspace, divisor: int = 1
) -> None:
    """Write ``source`` times ``factor`` over ``divisor`` to ``out``, both of ``dtype``.

    They may be one array; in host memory 16 bits may go to float32, and one of them may be of the
    longer integers of ``combined_as``. Integers are scaled in double precision and truncated toward
    zero; divided alone they are exact.
    """
    xp = scratch.xp
    if dtype in _CASTS and xp is np and out.dtype == np.float32:
        _kernels(dtype).widen(source.view(np.uint16), np.float32(factor), out)
        return
    if dtype in FLOATS:
        factor /= divisor
    elif divisor != 1 and factor == 1.0 and dtype != "bool":
        # CuPy computes the remainder of C's division in double precision, this one exactly.
        short = (source < 0) & (source % divisor != 0)
        quotient = out if out.dtype == source.dtype else xp.empty_like(source)
        xp.floor_divide(source, divisor, out=quotient)
        quotient += short.astype(quotient.dtype)
        if quotient is not out:
            out[...] = quotient
        return
    if factor == 1.0 and (divisor == 1 or dtype in FLOATS):
        if source is not out:
            out[...] = source
    elif dtype in ("float32", "float64"):
        xp.multiply(source, cast(np.generic, out.dtype.type(factor)), out=out)
    elif dtype in _CASTS and xp is np:
        _kernels(dtype).rescale(source.view(np.uint16), np.float32(factor), out.view(np.uint16))
    elif dtype in _CASTS:
        wide = to_float32(source, dtype, scratch, "scaled", factor)
        from_float32(wide, out, dtype, scratch)
    else:
        out[...] = xp.trunc(source * factor / divisor).astype(out.dtype)


def _kernels(dtype: str) -> Casts:
    from ringlet.compressors.kernels.cpu.dense import casts  # Numba is slow to import

    return casts.f16 if dtype == "float16" else casts.bf16
