"""What Numba lacks on the CPU: float16 by hardware, bfloat16, bit casts, a maximum by vectors.

Half-precision values are handled as uint16, because Numba cannot read float16 arrays on the CPU.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# 1.5 * 2**23: added to a float of up to 2**22 and subtracted again, it leaves that float rounded to
# the nearest integer, ties to even.
ROUNDER = 12582912.0


@intrinsic
def f32_to_f16(typingctx: Any, value: Any) -> Any:
    """Round a float32 to float16, to nearest even; return its bits as uint16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.fptrunc(args[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def f16_to_f32(typingctx: Any, bits: Any) -> Any:
    """Widen float16 bits (uint16) to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.bitcast(args[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def f32_bits(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def bits_f32(typingctx: Any, bits: Any) -> Any:
    """Return the float32 with the given uint32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Return the memory at an address (uint64), for ``numba.carray``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), codegen


@njit(inline="always")
def magnitude_bits(value: Any) -> Any:
    """Return the bits of |value| as int32, which order like magnitudes; NaN is the largest."""
    return types.int32(f32_bits(value) & types.uint32(0x7FFFFFFF))


def _largest_of(lanes: int) -> Any:
    @intrinsic
    def largest(typingctx: Any, values: Any, first: Any) -> Any:
        """Return the largest magnitude bits (uint32) of so many float32 from ``first`` on.

        Loops over so few values are unrolled by the compiler, and then read by gathers.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            vector = ir.VectorType(ir.IntType(32), lanes)
            place = builder.gep(array.data, [args[1]])
            bits = builder.load(builder.bitcast(place, vector.as_pointer()))
            bits.align = 4
            rest = builder.and_(bits, ir.Constant(vector, [0x7FFFFFFF] * lanes))
            kind = ir.FunctionType(ir.IntType(32), [vector])
            name = f"llvm.vector.reduce.umax.v{lanes}i32"
            reduce = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(reduce, [rest])

        return types.uint32(values, types.uint64), codegen

    return largest


largest_of_16 = _largest_of(16)
largest_of_32 = _largest_of(32)


@njit(inline="always")
def f32_to_bf16(value: Any) -> Any:
    """Round a float32 to bfloat16, to nearest even, NaN to a quiet NaN; bits as uint16."""
    bits = f32_bits(value)
    rounded = (bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1))) >> (
        types.uint32(16)
    )
    quiet = (bits >> types.uint32(16)) | types.uint32(0x40)
    is_nan = (bits & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000)
    return types.uint16(quiet if is_nan else rounded)


@njit(inline="always")
def bf16_to_f32(bits: Any) -> Any:
    """Widen bfloat16 bits (uint16) to float32."""
    return bits_f32(types.uint32(bits) << types.uint32(16))


@njit(inline="always")
def is_finite(value: Any) -> Any:
    """Whether a float32 is neither NaN nor infinite, in integer arithmetic."""
    return (f32_bits(value) & types.uint32(0x7F800000)) != types.uint32(0x7F800000)
