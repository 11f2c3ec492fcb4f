"""Conversion of the two 16-bit floats to float32 and back, in passes over memory.

MPI cannot sum float16 or bfloat16 and NumPy has no fast conversion, so sums are formed in float32
(``ringlet.ring.rank_order``).

Kernels see float16 as uint16: Numba cannot read float16 arrays on the CPU, LLVM's ``fpext`` and
``fptrunc`` can. They equal NumPy's casts bit for bit, but narrowing turns every NaN into one and
the same. They are compiled on first use and cached on disk.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringlet.ring.dtypes import Array

HALVES = ("float16", "bfloat16")
_building = threading.Lock()
_half_to_float: Any = None  # LLVM intrinsics; the kernels below look them up when they compile
_float_to_half: Any = None


class Kernels(NamedTuple):
    """Conversions between a half (uint16) and float32 array of one length."""

    widen: Callable[[Array, Array], None]  # widen(half, single): single[i] = half[i]
    add: Callable[[Array, Array], None]  # add(half, single): single[i] += half[i]
    narrow: Callable[[Array, Array], None]  # narrow(single, half): half[i] = round(single[i])


def _widen_float16(half: Array, single: Array) -> None:
    for i in range(half.size):
        single[i] = _half_to_float(half[i])


def _add_float16(half: Array, single: Array) -> None:
    for i in range(half.size):
        single[i] += _half_to_float(half[i])


def _narrow_float16(single: Array, half: Array) -> None:
    for i in range(half.size):
        x = single[i]
        half[i] = _float_to_half(x) if x == x else np.uint16(0x7E00)


def _widen_bfloat16(half: Array, single: Array) -> None:
    for i in range(half.size):
        single[i] = np.uint32(np.uint32(half[i]) << np.uint32(16)).view(np.float32)


def _add_bfloat16(half: Array, single: Array) -> None:
    for i in range(half.size):
        single[i] += np.uint32(np.uint32(half[i]) << np.uint32(16)).view(np.float32)


def _narrow_bfloat16(single: Array, half: Array) -> None:
    bits = single.view(np.uint32)
    for i in range(half.size):
        b = bits[i]
        top = np.uint32(b >> np.uint32(16))
        # Half a unit in the last place, less one where the kept part is even: ties go to even.
        rounded = np.uint32(b + np.uint32(0x7FFF) + (top & np.uint32(1))) >> np.uint32(16)
        is_nan = np.uint32(b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        half[i] = np.uint32(0x7FC0) if is_nan else rounded


def _numpy_widen(half: Array, single: Array) -> None:
    single[:] = half.view(np.float16)


def _numpy_add(half: Array, single: Array) -> None:
    single += half.view(np.float16)


def _numpy_narrow(single: Array, half: Array) -> None:
    half.view(np.float16)[:] = np.where(np.isnan(single), np.float32(np.nan), single)


def kernels(name: str) -> Kernels:
    """Return the conversions of ``"float16"`` or ``"bfloat16"``; compile them on first use."""
    with _building:
        return _build(name)


@functools.cache
def _build(name: str) -> Kernels:
    import numba
    from llvmlite import ir
    from numba.core import codegen, types
    from numba.core.extending import intrinsic

    from ringlet.ring.jit import jit

    global _half_to_float, _float_to_half
    if name == "bfloat16":
        return Kernels(jit(_widen_bfloat16), jit(_add_bfloat16), jit(_narrow_bfloat16))
    features = numba.config.CPU_FEATURES or codegen.get_host_cpu_features()
    if platform.machine() in ("x86_64", "AMD64") and "+f16c" not in features:
        # LLVM would call a library function that is not linked in.
        return Kernels(_numpy_widen, _numpy_add, _numpy_narrow)

    @intrinsic
    def half_to_float(typing: Any, bits: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.uint16), code

    @intrinsic
    def float_to_half(typing: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

        return types.uint16(types.float32), code

    _half_to_float, _float_to_half = half_to_float, float_to_half
    return Kernels(jit(_widen_float16), jit(_add_float16), jit(_narrow_float16))
