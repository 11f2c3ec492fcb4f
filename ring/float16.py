"""Reduction in rank order, and the two 16-bit floats that need special care.

MPI cannot sum float16 or bfloat16 and NumPy has no fast conversion, so their elements are widened
to float32, combined there, and rounded once (to nearest, ties to even) at the end. A transport that
lacks an operation builds it from ``combine`` and its own all-to-all: every shard is computed on one
rank, so all ranks hold the same bits, whatever NaNs and signed zeros went in.

Kernels see float16 as uint16: Numba cannot read float16 arrays on the CPU, LLVM's ``fpext`` and
``fptrunc`` can. They equal NumPy's casts bit for bit, but narrowing turns every NaN into one and
the same. They are compiled on first use and cached on disk.
"""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp, reducing
from ringlet.ring.dtypes import Array, storage

HALVES = ("float16", "bfloat16")
BLOCK = 32768  # elements; two float32 blocks stay in a level-2 cache

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}

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

    global _half_to_float, _float_to_half
    jit = numba.njit(nogil=True, cache=True)
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


def combine(pieces: Sequence[Array], outs: Sequence[Array], op: ReduceOp, name: str) -> None:
    """Combine equally long ``pieces`` in order and write the result to every array of ``outs``.

    An array may be both a piece and an out. 16-bit floats are accumulated in float32. All NaNs of
    the result have the same bits.
    """
    reducing(op)
    ufunc = UFUNCS[op]
    if len(pieces) == 1:
        for out in outs:
            if out is not pieces[0]:
                out[:] = pieces[0]
        return
    half = kernels(name) if name in HALVES else None
    dtype = np.dtype(np.float32) if half else storage(name)
    total = pieces[0].size
    if half:
        pieces = [piece.view(np.uint16) for piece in pieces]
        outs = [out.view(np.uint16) for out in outs]
    accumulator = np.empty(min(total, BLOCK), dtype)
    widened = np.empty_like(accumulator) if half and op != ReduceOp.SUM else accumulator
    rounded = np.empty(accumulator.size, np.uint16) if half else accumulator
    with np.errstate(all="ignore"):
        for start in range(0, total, BLOCK):
            block = slice(start, min(start + BLOCK, total))
            n = block.stop - start
            sums = accumulator[:n]
            if half is None:
                ufunc(pieces[0][block], pieces[1][block], out=sums)
                for piece in pieces[2:]:
                    ufunc(sums, piece[block], out=sums)
                settle_nans(sums)
            else:
                half.widen(pieces[0][block], sums)
                for piece in pieces[1:]:
                    if op == ReduceOp.SUM:
                        half.add(piece[block], sums)
                    else:
                        half.widen(piece[block], widened[:n])
                        ufunc(sums, widened[:n], out=sums)
                half.narrow(sums, rounded[:n])
            for out in outs:
                out[block] = rounded[:n]


def settle_nans(buffer: Array) -> None:
    """Give every NaN the same bits: whose NaN a sum of two returns depends on their order."""
    if buffer.size and buffer.dtype.kind == "f" and np.isnan(buffer.min()):
        buffer[np.isnan(buffer)] = np.nan


def even_counts(total: int, size: int) -> list[int]:
    """Divide ``total`` elements into ``size`` shards that differ by one element at most."""
    small, larger = divmod(total, size)
    return [small + (r < larger) for r in range(size)]


class Scratch:
    """Working memory that a communicator keeps between calls: fresh pages cost more than sums."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` uninitialised elements, valid until the next call."""
        nbytes = count * dtype.itemsize
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes].view(dtype)


def exchange_shards(
    comm: Communicator, send: Array, counts: Sequence[int], scratch: Scratch
) -> list[Array]:
    """Return every rank's piece for this rank, in rank order."""
    mine = counts[comm.rank]
    shards = scratch.take(mine * comm.size, send.dtype)
    comm.alltoall(send, shards, counts, [mine] * comm.size)
    return [shards[r * mine : (r + 1) * mine] for r in range(comm.size)]


def combine_everywhere(
    comm: Communicator, buffer: Array, op: ReduceOp, name: str, scratch: Scratch
) -> None:
    """Allreduce as an all-to-all, a reduction, and an all-gather: the wire bytes of a ring."""
    counts = even_counts(buffer.size, comm.size)
    shards = exchange_shards(comm, buffer, counts, scratch)
    combine(shards, shards[:1], op, name)
    comm.allgather(shards[0], buffer, counts)
