"""Checks of what several ranks have together: the mean, as exactly as the traits promise."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.context import Array
from ringlet.compressors.contract import Compressor
from ringlet.compressors.testing.basics import by_payload, same
from ringlet.compressors.testing.simulate import simulate
from ringlet.compressors.testing.vectors import gaussian, heavy_tailed

_STEPS = 24
_N = 2000


def check_mean_of_ranks(compressor: Compressor) -> None:
    """What training sees is the mean over ranks: its error must be within what the traits promise
    for one rank, and at least no larger than the ranks' own errors together.
    """
    if type(compressor.at(0)).finish is not Compressor.finish and not _averages(compressor):
        return  # the result is no mean, such as a vote
    delta, omega = compressor.at(0).traits().delta, compressor.at(0).traits().omega
    for size in (2, 3, 8):
        gradients = _alike(size)
        lengths = [_norm(x) for x in gradients]
        mean = np.mean(np.asarray(gradients, np.float64), axis=0)
        errors = []
        for step in range(_STEPS if omega or delta else 4):
            outs = _at_step(compressor, gradients, step)
            assert all(same(out, outs[0]) for out in outs), f"{size} ranks hold different results"
            errors.append(float(np.square(outs[0] - mean).sum()))
        error = float(np.sqrt(np.mean(errors)))
        # The triangle inequality: the error of a mean is at most the mean of the errors.
        if delta is not None:
            bound, claim = np.sqrt(1 - delta) * np.mean(lengths), f"for delta={delta:.4g}"
        elif omega is not None:
            bound, claim = np.sqrt(omega) * np.mean(lengths) * 1.1, f"for omega={omega:.4g}"
        else:
            alone = [_alone(compressor, x) for x in gradients]
            # Where ranks share a scale, each has a share of the levels that one alone has.
            factor = 1.5 if by_payload(compressor) else 1.5 * size
            bound, claim = factor * np.mean(alone), "by what single ranks lose"
        assert error <= bound + 2e-3 * np.mean(lengths), (
            f"the mean of {size} ranks is off by {error:.4g}, the bound {claim} is {bound:.4g} "
            f"(the mean's own norm is {_norm(mean):.4g})"
        )


def check_noise_averages_out(compressor: Compressor) -> None:
    """Unbiased noise pays because it cancels: the mean over W ranks has a W-th of one rank's
    variance, but only if ranks draw on their own. ctx.rng() does, unless it is shared.
    """
    traits = compressor.traits()
    if not traits.omega or traits.combine != "gather":
        return  # what is summed on the wire may have to be drawn alike
    x = gaussian(_N, 3)
    variance = {}
    for size in (1, 6):
        outs = [simulate(compressor, [x] * size, step=step)[0] for step in range(4 * _STEPS)]
        variance[size] = float(np.mean([np.square(out - x.astype(float)).sum() for out in outs]))
    assert variance[6] <= 1.6 * variance[1] / 6 + 1e-9 * _norm(x) ** 2, (
        f"over 6 ranks the variance falls to {variance[6] / variance[1]:.3g} of one rank's, not "
        "to a sixth: ranks draw the same noise"
    )


def _averages(compressor: Compressor) -> bool:
    """Whether finishing leaves the mean of what is constant as it is, as EF21's first step does."""
    x = np.full(64, 3, np.float32)
    return bool(np.allclose(simulate(compressor, [x])[0], x, rtol=0.2))


def _alike(size: int) -> list[Array]:
    """Return gradients that are mostly one, so that a sum is no mean."""
    common = heavy_tailed(_N, 1)
    return [common + gaussian(_N, 10 + rank, 0.3) for rank in range(size)]


def _at_step(compressor: Compressor, gradients: list[Array], step: int) -> list[Array]:
    shape = (40, 50)
    if compressor.traits().stateful or not by_payload(compressor):
        step = 0  # of a first step something is known
    return simulate(compressor.at(0), gradients, step=step, shape=shape)


def check_scales_with_its_values(compressor: Compressor) -> None:
    """Gradients carry a loss scale through compression, which is taken off the result: what makes
    results of their own size has to say so.
    """
    if not compressor.traits().scales:
        return
    x = gaussian(3000, 8)
    (one,), (more,) = (simulate(compressor, [np.float32(by) * x], step=1) for by in (1, 16))
    close = np.allclose(more, 16 * one, rtol=1e-2, atol=1e-2 * float(np.abs(x).max()))
    assert close, "16 times the values do not give 16 times the result: declare scales=False"


def _alone(compressor: Compressor, x: Array) -> float:
    out = _at_step(compressor, [x], 0)[0]
    return _norm(out - x.astype(np.float64))


def _norm(x: Array) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).sum()))


CHECKS = (check_mean_of_ranks, check_noise_averages_out, check_scales_with_its_values)
