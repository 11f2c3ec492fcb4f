"""Steps of error feedback that compressors share: kernels, or array code where there are none.

Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019: p = x + decay * e is compressed,
and e' = p - C(p) is kept. Where e' would not be finite, e stays.
"""

from __future__ import annotations

import numpy as np

from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges


def on_device(
    kernel: str, ctx: Context, out: Array, weight: float = 1.0, turn: int = 0, **arrays: Array
) -> bool:
    """Run an elementwise CUDA kernel on ``out`` and ``arrays``; False if there are none."""
    if ctx.xp is np:
        return False
    from ringlet.compressors.kernels.cuda.common import elementwise

    device = device_for(ctx)
    if device is None:
        return False
    elementwise.run(device, kernel, out, weight, turn, **arrays)
    return True


def target_into(x: Array, residual: Array, decay: float, out: Array, ctx: Context) -> None:
    """Set ``out`` to x + decay * residual."""
    check_lengths("error feedback", x.size, residual=residual, out=out)
    weight = np.float32(decay)
    if on_device("add", ctx, out, decay, a=x, b=residual):
        return
    if ctx.xp is not np:
        with np.errstate(invalid="ignore", over="ignore"):
            ctx.xp.multiply(residual, weight, out=out)
            out += x
        return
    from ringlet.compressors.kernels.cpu.common import feedback

    values = unlocked(x)

    def add(start: int, stop: int) -> None:
        at = slice(start, stop)
        feedback.add(values[at], residual[at], weight, out[at])

    run_ranges(x.size, 1, add)


def scale(out: Array, weight: float, ctx: Context) -> None:
    """Multiply ``out`` by ``weight``."""
    if not on_device("scale", ctx, out, weight):
        out *= np.float32(weight)


def add_scaled(out: Array, values: Array, weight: float, ctx: Context) -> None:
    """Add weight * values to ``out``; ``values`` may be overwritten."""
    check_lengths("a scaled sum", out.size, values=values)
    if not on_device("add", ctx, out, weight, a=out, b=values):
        values *= np.float32(weight)
        out += values


def keep_lost(target: Array, decoded: Array, residual: Array, ctx: Context) -> None:
    """Set ``residual`` to target - decoded where that is finite; ``decoded`` may be overwritten."""
    check_lengths("error feedback", residual.size, target=target, decoded=decoded)
    if on_device("keep", ctx, residual, a=target, b=decoded):
        return
    if ctx.xp is not np:
        # NaN - NaN and Inf - Inf are no surprise here: such elements are not kept.
        with np.errstate(invalid="ignore", over="ignore"):
            ctx.xp.subtract(target, decoded, out=decoded)
        ctx.xp.copyto(residual, decoded, where=ctx.xp.isfinite(decoded))
        return
    from ringlet.compressors.kernels.cpu.common import feedback

    def keep(start: int, stop: int) -> None:
        at = slice(start, stop)
        feedback.keep(target[at], decoded[at], residual[at])

    run_ranges(target.size, 1, keep)


def keep_combined(
    target: Array, sent: Array, combined: Array, residual: Array, ctx: Context
) -> None:
    """Set ``residual`` to target - sent where that and the ``combined`` result are finite."""
    check_lengths("error feedback", residual.size, target=target, sent=sent, combined=combined)
    if on_device("keep_combined", ctx, residual, a=target, b=sent, c=combined):
        return
    if ctx.xp is not np:
        with np.errstate(invalid="ignore", over="ignore"):
            lost = target - sent
        finite = ctx.xp.isfinite(lost) & ctx.xp.isfinite(combined)
        ctx.xp.copyto(residual, lost, where=finite)
        return
    from ringlet.compressors.kernels.cpu.common import feedback

    def keep(start: int, stop: int) -> None:
        at = slice(start, stop)
        feedback.keep_combined(target[at], sent[at], combined[at], residual[at])

    run_ranges(target.size, 1, keep)


def advance(x: Array, residual: Array, decay: float, ctx: Context) -> Array:
    """Set ``residual`` to p = x + decay * residual where that is finite; return p. CPU only.

    That is ``residual`` itself, unless something was not finite.
    """
    from ringlet.compressors.kernels.cpu.common import feedback

    check_lengths("error feedback", x.size, residual=residual)
    bad, weight = ctx.workspace.array("candidates", x.size, np.uint32), np.float32(decay)
    counts: dict[int, int] = {}
    values = unlocked(x)

    def add(start: int, stop: int) -> None:
        at = slice(start, stop)
        counts[start] = feedback.advance(values[at], residual[at], weight, start, bad[at])

    run_ranges(x.size, 1, add)
    if not any(counts.values()):
        return residual
    target = ctx.workspace.array("feedback", x.size)
    target[...] = residual
    for start, count in counts.items():
        places = bad[start : start + count]
        with np.errstate(invalid="ignore", over="ignore"):
            target[places] = x[places] + weight * residual[places]
    return target


def settle(target: Array, indices: Array, decoded: Array, residual: Array, ctx: Context) -> None:
    """Keep ``target`` where nothing was sent, and what ``decoded`` lacks where it was. CPU only."""
    from ringlet.compressors.kernels.cpu.common import feedback, scatter

    check_lengths("error feedback", target.size, residual=residual)
    check_lengths("error feedback", indices.size, decoded=decoded)
    old = ctx.workspace.array("old", indices.size)
    scatter.gather(residual, indices, old)

    def keep(start: int, stop: int) -> None:
        feedback.keep_finite(target[start:stop], residual[start:stop])

    run_ranges(target.size, 1, keep)
    feedback.settle(target, indices, decoded, old, residual)
