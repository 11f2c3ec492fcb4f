"""Checks of values that authors do not think of: tiny, huge, not finite, of one sign, all equal."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, large, special, spiky
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import by_payload, context, decode, encode, simulate

_N = 1500
_MILLION = (1 << 20) + 3
# As bits: a usual NaN, Inf, -Inf, and NaNs that rounding to fewer bits makes other numbers of.
_NOT_FINITE = (
    0x7FC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000,
)  # fmt: skip
_STEPS = 4
_ALIKE = 4.0  # times: how much larger what comes of one sign may be than what comes of the other
_LEAST = 0.05  # of what comes of magnitudes: what comes of the same values with both signs
_LONG = 200_000
_GROWN, _FOLLOWS = 64, 0.25
_FEW = 64
# Sizes close to each other: of 127.5 to 128 steps, which are rounded to 128, there is one at least.
_SIZES = np.exp2(np.arange(-16, 16, 1 / 256), dtype=np.float32)
_PLACES = 8
_PATIENCE, _FEEDBACK = 400, 100  # steps; in the first of them what was kept before may still come


@needs(*PURE, "points_the_same_way")
def check_extreme_values(compressor: Compressor) -> None:
    """Gradients are zero, tiny and huge at times; finite numbers must not turn into NaN, and zeros
    must not turn into garbage.

    Guard divisions: all of x may be zero, and a scale may be too small to divide by. Put 1 in the
    place of a scale of 0 where it divides, and not where it is sent. Clip an exponent to its
    integer type: float32 has values down to 2^-149. Do not refuse NaN and Inf: they show an
    overflow, whose step is skipped.
    """

    def body(x: Array) -> None:
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [x])
        if np.isfinite(x).all() and (np.abs(x) < 2.0**15).all():
            assert np.isfinite(out).all(), f"finite values decode to {out}"

    for_all(special(), body)
    subnormal = np.float32(2.0**-149) * np.arange(-700, 700, dtype=np.float32)
    with np.errstate(all="ignore"):
        (out,) = simulate(compressor, [subnormal])
    assert not compressor.traits().scales or not (np.abs(out) > 2.0**64).any(), (
        f"{subnormal.size} values below 2^-139 come out as up to {np.abs(out).max():.4g}: an "
        "exponent does not fit its integer type"
    )
    for n in (1, 70, 3000) if compressor.traits().scales else ():
        (out,) = simulate(compressor, [np.zeros(n, np.float32)])
        assert not out.any(), (
            f"{n} zeros come out as {out[np.flatnonzero(out)[0]]:.4g}; where results go by "
            "absolute sizes, declare scales=False"
        )


@needs(*PURE, "points_the_same_way", "the_last_element_counts")
def check_non_finite_stays_visible(compressor: Compressor) -> None:
    """Loss scaling finds overflow by looking at reduced gradients: a codec that turns Inf or NaN
    into an ordinary number hides it, and the step that should be skipped is taken.

    Let a NaN or Inf anywhere in x come out as NaN or Inf somewhere: a scale of x.max() becomes NaN
    or Inf by itself, and 0 * Inf is NaN; do not use nan_to_num, clip or fmax on the way. What
    sends a selection counts NaN as largest.
    """
    for bits in _NOT_FINITE:
        for n, place in ((1, 0), (70, 69), (3000, 1234)):
            _check_visible(compressor, gaussian(n, 4), place, bits)
    for n, place in ((3000, 0), (_MILLION, _MILLION // 2), (_MILLION, _MILLION - 1)):
        x = large()[:n].copy() if n == _MILLION else gaussian(n, 4)
        _check_visible(compressor, x, place, _NOT_FINITE[0])
    for x in (spiky(3000, 4), np.zeros(3000, np.float32)):  # some send few values otherwise
        for bits in _NOT_FINITE[:2]:
            _check_visible(compressor, x.copy(), 1234, bits)
    for bad in (np.nan, np.inf):  # a run that has diverged has nothing else
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [np.full(3000, bad, np.float32)])
        assert not np.isfinite(out).all(), f"3000 elements that are all {bad} vanished"
    for one, other in ((np.inf, -np.inf), (np.nan, np.inf)):
        x = gaussian(3000, 4)
        x[[7, 1234]] = one, other
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [x])
        assert not np.isfinite(out).all(), (
            f"{one} at element 7 and {other} at element 1234 of 3000 vanished together, and not by "
            "themselves"
        )


@needs(
    "non_finite_stays_visible",
    "one_overflow_is_survived",
    "second_stage",
    "another_process_agrees",
)
def check_sums_keep_what_is_not_finite(compressor: Compressor) -> None:
    """The engine adds up by sum_into and accumulate, and owners of shards compress sums again, as
    ctx.stage 2: NaN that is lost there is an overflow that nobody sees.

    Add all that decompress gives: do not leave codes of 0 out of a sum, whose scale may be NaN, and
    use neither nansum nor nan_to_num. Compress in the second stage as in the first.
    """
    if not by_payload(compressor):
        return
    spoiled, sound = gaussian(3000, 4), gaussian(3000, 5)
    spoiled[1234] = np.nan
    traits = compressor.traits()
    cut = traits.granularity is not None and traits.fixed_size and traits.combine == "gather"
    with np.errstate(all="ignore"):
        if cut:
            ctx = context(spoiled, size=3, stage=2)
            out = decode(compressor, encode(compressor, spoiled, ctx), 3000, ctx)
            assert not np.isfinite(out).all(), "NaN vanished as ctx.stage 2: in the mean of a shard"
        ctx = context(spoiled, size=3)
        payloads = [encode(compressor, x, context(x, size=3)) for x in (sound, spoiled, sound)]
        total, added = np.zeros(3000, np.float32), sound.copy()
        compressor.sum_into(payloads, total, ctx)
        compressor.accumulate(payloads[1], added, ctx)
    for what, out in (("sum_into", total), ("accumulate", added)):
        assert not np.isfinite(out).all(), f"NaN vanished in {what} of a payload that has it"


def _check_visible(compressor: Compressor, x: Array, place: int, bits: int) -> None:
    """Raise AssertionError where what is not finite leaves no trace; ``x`` is written to."""
    x.view(np.uint32)[place] = bits
    with np.errstate(all="ignore"):
        (out,) = simulate(compressor, [x])
    if not np.isfinite(out).all():
        return
    x[place], n = 1e4, x.size
    came = float(simulate(compressor, [x])[0][place])
    assert came > 0, (
        f"element {place} of {n} is lost, whatever it is: 10000 comes out as {came:.4g} there, and "
        "NaN or Inf vanishes with it"
    )
    bad = np.array([bits], np.uint32).view(np.float32)[0]
    raise AssertionError(f"{bad} (0x{bits:08x}) at element {place} of {n} vanished")


@needs(*PURE, "points_the_same_way", "extreme_values")
def check_both_signs_arrive(compressor: Compressor) -> None:
    """Gradients of a bias, or behind a ReLU, often have one sign: a scale that is the largest value
    in place of the largest magnitude is 0 or negative there, and such a tensor is never trained.

    Take magnitudes first: xp.abs(x).max() and xp.abs(x).mean(), and neither x.max() nor
    xp.abs(x.mean()). Where the range of values is 0, send the value itself, with its sign.
    """
    signed = gaussian(_N, 3)
    size = np.abs(signed)
    plus, minus = (
        _length(compressor, size, "values that are all positive"),
        _length(compressor, -size, "values that are all negative"),
    )
    for sign in (1, -1):
        what = f"64 values of {3 * sign}"
        _length(compressor, np.full(64, 3 * sign, np.float32), what)
    more, less = max(plus, minus), min(plus, minus)
    which = "negative" if minus < plus else "positive"
    assert more <= _ALIKE * less, (
        f"what comes of {_N} values that are all {which} is {less:.3g} long, and {more:.3g} long "
        "where they have the other sign"
    )
    signed[gaussian(_N, 4) < -1.28] = 0  # in no pattern, which might be a plugin's own
    holes = _length(compressor, np.abs(signed), "")
    assert holes >= _LEAST * plus, (
        f"where a tenth of {_N} positive values is 0, what comes of them is {holes:.3g} long, "
        f"and {plus:.3g} long where none is: zeros spoil a scale, such as a geometric mean"
    )
    signed = gaussian(_N, 3)
    traits = compressor.at(0).traits()
    if traits.combine != "gather" or compressor.divergence():
        return  # what is linear may be a mean, in which signs cancel
    both = _length(compressor, signed, "")
    assert both >= _LEAST * more, (
        f"what comes of {_N} values of both signs is {both:.3g} long, and {more:.3g} long where "
        "they have one sign: they cancel in a scale"
    )


def _length(compressor: Compressor, x: Array, what: str) -> float:
    """Return how long the results for ``x`` are; AssertionError where they point away from it."""
    outs = [simulate(compressor, [x], step=step)[0].astype(np.float64) for step in range(_STEPS)]
    along = float(np.sum(outs, axis=0) @ x)
    assert not what or along > 0 or not np.any(outs), (
        f"{what} come out with the other sign, on the whole"
    )
    return float(np.linalg.norm(outs))


@needs(*PURE, "extreme_values", "large_tensors")
def check_one_of_many_stays_finite(compressor: Compressor) -> None:
    """Of an embedding's gradient a single value may not be zero: over a mean of 200000 it is larger
    than float16 can hold, and a step is skipped that was sound.

    Divide by the largest magnitude where quotients are sent as float16 or as integers: a mean may
    be as many times smaller as there are elements.
    """
    x = np.zeros(_LONG, np.float32)
    x[_LONG // 2] = -3
    with np.errstate(all="ignore"):
        (out,) = simulate(compressor, [x], step=1)
    assert np.isfinite(out).all(), (
        f"one value of -3 among {_LONG} zeros comes out as {out[_LONG // 2]:.3g}, and "
        f"{int((~np.isfinite(out)).sum())} elements are not finite"
    )
    assert out[_LONG // 2] <= 0, (
        f"one value of -3 among {_LONG} zeros comes out as {out[_LONG // 2]:.3g}"
    )


@needs(*PURE, "points_the_same_way", "memory_is_declared", "extreme_values")
def check_values_may_grow(compressor: Compressor) -> None:
    """Gradients grow from one step to the next, where a learning rate is raised or a batch is
    unlike others: a scale that is remembered is then too small, and codes wrap round.

    Keep codes in their range whatever is remembered: xp.clip(codes, -127, 127), with NaN in the
    scale that is sent. Or take this step's values into account in full: xp.maximum(remembered,
    xp.abs(x).max()). What is remembered may be 0: of gradients that were 0, as those of frozen
    layers and of LoRA's first matrix are.
    """
    if not compressor.traits().stateful:
        return
    _check_growth(compressor)
    _check_after_zeros(compressor)


def _check_growth(compressor: Compressor) -> None:
    """Raise AssertionError where what is remembered of small values spoils large ones."""
    x, turned, before = gaussian(_N, 5), 0, 0.0
    states: list[State] = [{}, {}]
    large = np.abs(x) >= np.float32(0.5) * np.abs(x).max()
    for step in range(_STEPS):
        by = np.float32(_GROWN if step == _STEPS - 1 else 1)
        (out, _) = simulate(compressor, [by * x, by * x], states, step)
        turned = int((out[large] * x[large] < 0).sum())
        if by == 1 and turned:
            return  # it is not that kind of code
        before = max(before, float(np.linalg.norm(out))) if by == 1 else before
    assert not turned, (
        f"after {_STEPS - 1} steps values {_GROWN} times as large come, and {turned} of the "
        f"{int(large.sum())} largest come out with the other sign"
    )
    for step in range(_STEPS, _STEPS + _PATIENCE if compressor.traits().scales else 0):
        if float(np.linalg.norm(out)) >= _FOLLOWS * _GROWN * before:
            return
        (out, _) = simulate(compressor, [by * x, by * x], states, step)
    assert not compressor.traits().scales, (
        f"after {_STEPS - 1} steps values {_GROWN} times as large come, and {_PATIENCE} steps "
        f"later results are {float(np.linalg.norm(out)) / before:.3g} times as large as before: a "
        "scale, or a table of levels, that is remembered does not follow them"
    )


def _check_after_zeros(compressor: Compressor) -> None:
    """Raise AssertionError where what is remembered of zeros spoils what comes after them."""
    x, nothing = gaussian(_N, 5), np.zeros(_N, np.float32)
    usual, late = [State(), State()], [State(), State()]
    lengths = []
    for step in range(_STEPS):
        lengths.append(float(np.linalg.norm(simulate(compressor, [x, x], usual, step)[0])))
        simulate(compressor, [nothing, nothing], late, step)
    scales = compressor.traits().scales
    for step in range(_STEPS, _STEPS + _PATIENCE):
        (out, _) = simulate(compressor, [x, x], late, step)
        assert np.isfinite(out).all(), (
            f"after {_STEPS} gradients of zeros finite values come out as NaN or Inf in step {step}"
        )
        if not scales or float(np.linalg.norm(out)) >= _FOLLOWS * max(lengths):
            return
    raise AssertionError(
        f"after {_STEPS} gradients of zeros, {_PATIENCE} steps of values that are not 0 are not "
        f"enough: what comes out is {float(np.linalg.norm(out)):.3g} long, and {max(lengths):.3g} "
        "where none were 0; a scale that is remembered stays 0"
    )


@needs("values_may_grow", "gradient_units", "one_overflow_is_survived")
def check_values_may_shrink(compressor: Compressor) -> None:
    """Gradients shrink while a model trains, and after a batch unlike others: a threshold that
    remembers the largest there ever was sends nothing any more, in silence.

    Let what is remembered of sizes forget: level = max(0.9 * level, float(xp.abs(x).max())), and
    send at least one entry, max(1, k).
    """
    if not compressor.traits().stateful or not compressor.traits().scales:
        return
    x = gaussian(_FEW, 6)
    states: list[State] = [{}]
    steps = _STEPS * _STEPS
    large = [simulate(compressor, [x], states, step)[0].any() for step in range(steps)]
    if not any(large):
        return  # which another check tells
    assert any(large[1:]), (
        f"of a gradient that comes {steps} times only the first is sent: a result is the gradient "
        "of its step, and not how it differs from the step before"
    )
    small = np.float32(1 / _GROWN) * x
    for step in range(steps, steps + _PATIENCE):
        if simulate(compressor, [small], states, step)[0].any() and step > steps + _FEEDBACK:
            return
    raise AssertionError(
        f"after {steps} steps values {_GROWN} times as small come, and of none of them anything "
        f"is sent in {_PATIENCE - _FEEDBACK} steps"
    )


@needs("both_signs_arrive")
def check_every_size_keeps_its_sign(compressor: Compressor) -> None:
    """What goes by absolute sizes often has a code of its own for each range of sizes: where the
    largest of a range is rounded beyond its integer type, its sign turns round.

    Clip what is rounded: xp.minimum(xp.rint(xp.abs(x) / step), 127), and give it its sign then.
    """
    traits = compressor.at(0).traits()
    if traits.scales or traits.stateful:
        return  # one step for all: other checks look at its largest code
    for x in (_SIZES, -_SIZES):
        (out,) = simulate(compressor, [x])
        for value in x[out * x < 0][:_PLACES]:
            (alone,) = simulate(compressor, [np.full(_FEW, value)])
            assert alone.mean() * value >= 0, (
                f"values of {value:.5g} come out as {alone.mean():.5g}: a code does not fit its "
                "integer type"
            )


CHECKS = (
    check_extreme_values,
    check_non_finite_stays_visible,
    check_sums_keep_what_is_not_finite,
    check_both_signs_arrive,
    check_every_size_keeps_its_sign,
    check_one_of_many_stays_finite,
    check_values_may_grow,
    check_values_may_shrink,
)
