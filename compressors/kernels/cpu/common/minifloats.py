"""Rounding to floats of 4 to 8 bits by integer arithmetic on 16 values at a time.

A float y of exponent e, rounded to m mantissa bits, is y + C - C with C = 2**(e + 23 - m): the sum
has no room for smaller bits. Exponents below the smallest normal one count as that one, which makes
subnormals right as well. At random, noise below the last bit that stays carries into it as often as
it should. The vectors are written out: loops over blocks so small are not made vectors of.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, f32_bits, is_finite
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.compressors.kernels.cpu.common.target import target_at

LANES = 16
_INT, _FLOAT = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
_BYTE = ir.VectorType(ir.IntType(8), LANES)


def _all(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    """Return a vector whose lanes are ``value``: a number, or a value of the builder's."""
    if not hasattr(value, "type"):
        return ir.Constant(kind, [value] * LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(_INT, [0] * LANES))


def _place(context: Any, builder: Any, kind: Any, array: Any, first: Any, vector: Any) -> Any:
    """Return where the elements of ``array`` from ``first`` on lie, as a ``vector``."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [first]), vector.as_pointer())


def _load(builder: Any, place: Any, align: int) -> Any:
    found = builder.load(place)
    found.align = align
    return found


def _rounding(stochastic: bool, keeping: bool) -> Any:
    @intrinsic
    def rounded(
        typingctx: Any, values: Any, first: Any, inverse: Any, noise: Any, codes: Any, kept: Any,
        bits: Any, mantissa: Any, lowest: Any, largest: Any, maximum: Any, unit: Any,
    ) -> Any:  # fmt: skip
        """Round 16 of ``values`` (float32) from ``first`` (uint64) on, times ``inverse``.

        Codes (uint8) go to the same places of ``codes``, what they stand for, times ``unit``, to
        those of ``kept`` (float32) if ``keeping``. ``noise`` (uint32) is used at random alone; the
        format's numbers are uint32, and ``maximum`` a float32. What is too large saturates.
        """
        signature = types.void(
            values, types.uint64, types.float32, noise, codes, kept, types.uint32, types.uint32,
            types.uint32, types.uint32, types.float32, types.float32,
        )  # fmt: skip

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def place(number: int, vector: ir.VectorType) -> Any:
                kind, array = signature.args[number], args[number]
                return _place(context, builder, kind, array, args[1], vector)

            def whole(value: Any) -> Any:
                return _all(builder, value, _INT)

            def number(value: int) -> Any:
                return ir.Constant(ir.IntType(32), value)

            bits, mantissa, lowest, largest = args[6:10]
            scaled = builder.fmul(
                _load(builder, place(0, _FLOAT), 4), _all(builder, args[2], _FLOAT)
            )
            raised = builder.bitcast(scaled, _INT)
            sign = builder.and_(raised, whole(0x80000000))
            rest = builder.and_(raised, whole(0x7FFFFFFF))
            shift = builder.sub(number(23), mantissa)  # bits of a float32 that go
            least = whole(builder.shl(lowest, number(23)))
            subnormal = builder.icmp_unsigned("<", rest, least)
            if stochastic:
                one = builder.select(subnormal, least, whole(0))
                normal = builder.fadd(builder.bitcast(rest, _FLOAT), builder.bitcast(one, _FLOAT))
                drawn = builder.lshr(
                    _load(builder, place(3, _INT), 4), whole(builder.add(number(9), mantissa))
                )
                moved = builder.add(builder.bitcast(normal, _INT), drawn)
                floor = builder.lshr(moved, whole(shift))
                below = builder.shl(builder.sub(lowest, number(1)), mantissa)
                base = builder.select(subnormal, whole(builder.shl(lowest, mantissa)), whole(below))
                code = builder.sub(floor, base)
                stays = builder.bitcast(builder.shl(floor, whole(shift)), _FLOAT)
                value = builder.fsub(stays, builder.bitcast(one, _FLOAT))
            else:
                high = builder.select(subnormal, least, rest)
                exponent = builder.and_(high, whole(0x7F800000))
                base = builder.add(exponent, whole(builder.shl(shift, number(23))))
                anchor = builder.bitcast(base, _FLOAT)
                total = builder.fadd(builder.bitcast(rest, _FLOAT), anchor)
                steps = builder.sub(builder.bitcast(total, _INT), base)
                code = builder.add(steps, builder.lshr(exponent, whole(shift)))
                code = builder.sub(code, whole(builder.shl(lowest, mantissa)))
                value = builder.fsub(total, anchor)
            over = builder.icmp_unsigned(">", code, whole(largest))
            code = builder.select(over, whole(largest), code)
            high = builder.lshr(sign, whole(builder.sub(number(32), bits)))
            code = builder.trunc(builder.or_(code, high), _BYTE)
            builder.store(code, place(4, _BYTE)).align = 1
            if keeping:
                value = builder.select(over, _all(builder, args[10], _FLOAT), value)
                value = builder.bitcast(builder.or_(builder.bitcast(value, _INT), sign), _FLOAT)
                value = builder.fmul(value, _all(builder, args[11], _FLOAT))
                builder.store(value, place(5, _FLOAT)).align = 4
            return context.get_dummy_value()

        return signature, codegen

    return rounded


_nearest, _at_random = _rounding(False, False), _rounding(True, False)
_nearest_kept, _at_random_kept = _rounding(False, True), _rounding(True, True)


@intrinsic
def decoded(
    typingctx: Any, codes: Any, first: Any, scale: Any, out: Any, place: Any, bits: Any,
    mantissa: Any, lowest: Any, largest: Any, infinite: Any, add: Any,
) -> Any:  # fmt: skip
    """Set 16 of ``out`` (float32) from ``place`` on to the values of ``codes`` times ``scale``.

    ``codes`` (uint8) are those from ``first`` on, both uint64; ``add`` (bool) adds. The format's
    numbers are uint32.
    """
    signature = types.void(
        codes, types.uint64, types.float32, out, types.uint64, types.uint32, types.uint32,
        types.uint32, types.uint32, types.uint32, types.boolean,
    )  # fmt: skip

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, (bits, mantissa, lowest, largest, infinite) = signature.args, args[5:10]

        def whole(value: Any) -> Any:
            return _all(builder, value, _INT)

        def number(value: int) -> Any:
            return ir.Constant(ir.IntType(32), value)

        source = _place(context, builder, kinds[0], args[0], args[1], _BYTE)
        code = builder.zext(_load(builder, source, 1), _INT)
        high = builder.sub(bits, number(1))
        most = builder.sub(builder.shl(number(1), high), number(1))
        rest = builder.and_(code, whole(most))
        sign = builder.shl(builder.lshr(code, whole(high)), whole(31))
        least, below = builder.shl(lowest, number(23)), builder.sub(lowest, number(1))
        subnormal = builder.icmp_unsigned("<", rest, whole(builder.shl(number(1), mantissa)))
        # A subnormal is read as a normal number of the lowest exponent, less that number's one.
        bias = builder.select(subnormal, whole(least), whole(builder.shl(below, number(23))))
        one = builder.select(subnormal, whole(least), whole(0))
        placed = builder.shl(rest, whole(builder.sub(number(23), mantissa)))
        normal = builder.bitcast(builder.add(placed, bias), _FLOAT)
        value = builder.bitcast(builder.fsub(normal, builder.bitcast(one, _FLOAT)), _INT)
        beyond = builder.icmp_unsigned("==", rest, whole(infinite))
        beyond = builder.select(beyond, whole(0x7F800000), whole(0x7FC00000))
        value = builder.select(builder.icmp_unsigned(">", rest, whole(largest)), beyond, value)
        value = builder.bitcast(builder.or_(value, sign), _FLOAT)
        value = builder.fmul(value, _all(builder, args[2], _FLOAT))
        target = _place(context, builder, kinds[3], args[3], args[4], _FLOAT)
        total = builder.fadd(_load(builder, target, 4), value)
        chosen = builder.select(args[10], total, value)
        builder.store(chosen, target).align = 4
        return context.get_dummy_value()

    return signature, codegen


@njit(inline="always")
def nearest(bits: Any, m: Any, lowest: Any) -> Any:
    """Return the code of the magnitude of these bits, not saturated: of a single value."""
    exponent = max(bits, types.uint32(lowest << 23)) & types.uint32(0x7F800000)
    base = exponent + types.uint32((23 - m) << 23)
    steps = f32_bits(bits_f32(bits) + bits_f32(base)) - base
    code = steps + (exponent >> types.uint32(23 - m)) - types.uint32(lowest << m)
    return types.uint32(code)


@njit(inline="always")
def rounded_run(
    values: Any, block: Any, units: Any, inverses: Any, key: Any, start: Any, noise: Any,
    codes: Any, kept: Any,
    bits: Any, mantissa: Any, lowest: Any, largest: Any, maximum: Any, stochastic: bool,
    keeping: bool,
) -> None:  # fmt: skip
    """Round whole blocks of ``values`` times their inverse scale: ``codes``, and what is ``kept``.

    The latter if ``keeping``. ``start`` is the counter of the first value; ``noise`` is scratch
    (uint32).
    """
    if stochastic:
        for i in range(noise.size):
            noise[i] = squares(key, start + types.uint64(i))
    for b in range(inverses.size):
        for i in range(0, block, LANES):
            first = types.uint64(b * block + i)
            if stochastic and keeping:
                _at_random_kept(
                    values, first, inverses[b], noise, codes, kept, types.uint32(bits),
                    types.uint32(mantissa), types.uint32(lowest), types.uint32(largest),
                    types.float32(maximum), units[b],
                )  # fmt: skip
            elif stochastic:
                _at_random(
                    values, first, inverses[b], noise, codes, kept, types.uint32(bits),
                    types.uint32(mantissa), types.uint32(lowest), types.uint32(largest),
                    types.float32(maximum), units[b],
                )  # fmt: skip
            elif keeping:
                _nearest_kept(
                    values, first, inverses[b], noise, codes, kept, types.uint32(bits),
                    types.uint32(mantissa), types.uint32(lowest), types.uint32(largest),
                    types.float32(maximum), units[b],
                )  # fmt: skip
            else:
                _nearest(
                    values, first, inverses[b], noise, codes, kept, types.uint32(bits),
                    types.uint32(mantissa), types.uint32(lowest), types.uint32(largest),
                    types.float32(maximum), units[b],
                )  # fmt: skip


@njit(nogil=True)
def widened(values: Any, held: Any, decay: Any, wide: Any, feedback: Any) -> None:
    """Fill a run's ``wide`` values with what is encoded (see ``target_at``), and zeros behind."""
    for i in range(values.size):
        wide[i] = target_at(values, held, decay, i, feedback)
    wide[values.size :] = types.float32(0)


@njit(nogil=True)
def write_scales(found: Any, invalid: Any, size: Any, scratch: Any, scales: Any) -> None:
    """Write the scales of a run's first ``size`` values; where one is ``invalid``, clear its block.

    ``found`` has a scale for every block of ``scratch``, the codes of the run.
    """
    block, worst = scratch.size // found.size, types.uint8(0)
    for b in range((size + block - 1) // block):
        scales[b] = found[b]
        worst = max(worst, found[b])
    for b in range(found.size if worst == types.uint8(invalid) else 0):
        if found[b] == types.uint8(invalid):
            scratch[b * block : (b + 1) * block] = types.uint8(0)


@njit(inline="always")
def keep_lost(values: Any, kept: Any, held: Any) -> None:
    """Set ``held`` to values less what is kept of them, where that is finite."""
    for i in range(held.size):
        lost = values[i] - kept[i]
        held[i] = lost if is_finite(lost) else held[i]


@njit(inline="always")
def value_of(code: Any, bits: Any, m: Any, lowest: Any, largest: Any, infinite: Any) -> Any:
    """Return the float32 of a code of ``bits`` bits; ``infinite`` is the magnitude that is Inf."""
    rest = code & types.uint32((1 << (bits - 1)) - 1)
    sign = (code >> types.uint32(bits - 1)) << types.uint32(31)
    subnormal = rest < types.uint32(1 << m)
    # A subnormal is read as a normal number of the lowest exponent, less that number's one.
    bias = types.uint32(lowest << 23) if subnormal else types.uint32((lowest - 1) << 23)
    one = bits_f32(types.uint32(lowest << 23) if subnormal else types.uint32(0))
    found = f32_bits(bits_f32((rest << types.uint32(23 - m)) + bias) - one)
    if bits == 8:
        found = types.uint32(0x7FC00000) if rest > types.uint32(largest) else found
        found = types.uint32(0x7F800000) if rest == types.uint32(infinite) else found
    return bits_f32(found | sign)
