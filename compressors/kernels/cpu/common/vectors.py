"""Sixteen float32 at a time, where a compiler would not see that vectors will do."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import errors, types
from numba.extending import intrinsic

WIDTH = 16

_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)


@intrinsic
def reaching(typingctx: Any, values: Any, at: Any, least: Any) -> Any:
    """Return a bit for each of ``values[at : at + WIDTH]`` whose magnitude reaches ``least``.

    ``least`` (int32) is a magnitude's bits. Nothing is checked against the array's end.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], args[0], args[1])
        return _mask(builder, loaded, args[2])

    return types.uint32(values, types.intp, types.int32), codegen


@intrinsic
def reaching_sum(typingctx: Any, values: Any, held: Any, decay: Any, at: Any, least: Any) -> Any:
    """Do the same for ``values + decay * held``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _mask(builder, _sum(context, builder, signature, args, args[3]), args[4])

    return types.uint32(values, held, types.float32, types.intp, types.int32), codegen


@intrinsic
def lowest(typingctx: Any, mask: Any) -> Any:
    """Return the place of the lowest bit that is set in ``mask`` (uint32), which is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.zext(place, ir.IntType(64))

    return types.intp(types.uint32), codegen


@intrinsic
def advance(typingctx: Any, values: Any, held: Any, decay: Any, at: Any) -> Any:
    """Set ``held[at : at + WIDTH]`` to ``values + decay * held`` there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = _sum(context, builder, signature, args, args[3])
        builder.store(total, _place(context, builder, signature.args[1], args[1], args[3]), align=4)
        return context.get_dummy_value()

    return types.void(values, held, types.float32, types.intp), codegen


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    if kind.layout != "C":  # the elements would be others, or nobody's
        raise errors.TypingError("these kernels take contiguous arrays")
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), _FLOATS.as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.load(_place(context, builder, kind, array, at), align=4)


def _sum(context: Any, builder: Any, signature: Any, args: Any, at: Any) -> Any:
    values = _load(context, builder, signature.args[0], args[0], at)
    held = _load(context, builder, signature.args[1], args[1], at)
    return builder.fadd(values, builder.fmul(_spread(builder, args[2], _FLOATS), held))


def _mask(builder: Any, floats: Any, least: Any) -> Any:
    bits = builder.bitcast(floats, _INTS)
    magnitudes = builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * WIDTH))
    passes = builder.icmp_signed(">=", magnitudes, _spread(builder, least, _INTS))
    return builder.zext(builder.bitcast(passes, ir.IntType(WIDTH)), ir.IntType(32))


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(_INTS, [0] * WIDTH))
