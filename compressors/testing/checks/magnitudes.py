"""Checks of values that authors do not think of: of one sign, all equal, one of many."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.testing.checks.one_call import PURE
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import simulate

_N = 1500
_STEPS = 4
_ALIKE = 4.0  # times: how much larger what comes of one sign may be than what comes of the other
_LEAST = 0.05  # of what comes of magnitudes: what comes of the same values with both signs
_LONG = 200_000
_GROWN, _FOLLOWS = 64, 0.25
_FEW = 64
_PATIENCE, _FEEDBACK = 400, 100  # steps; in the first of them what was kept before may still come


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
    signed[::10] = 0
    holes = _length(compressor, np.abs(signed), "")
    assert holes >= _LEAST * plus, (
        f"where every tenth of {_N} positive values is 0, what comes of them is {holes:.3g} long, "
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
    xp.abs(x).max()).
    """
    if not compressor.traits().stateful:
        return
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


CHECKS = (
    check_both_signs_arrive,
    check_one_of_many_stays_finite,
    check_values_may_grow,
    check_values_may_shrink,
)
