"""Updates of what EF21 and momentum correction remember: kernels on CPU and GPU, or array code."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges


def difference_into(x: Array, total: Array | None, known: Array, out: Array, ctx: Context) -> None:
    """Set ``out`` to x - known, or with a ``total`` to total + x - known."""
    check_lengths("difference", x.size, total=total, known=known, out=out)
    if _on_device("differ", ctx, x, kept=total, other=known, out=out):
        return
    if total is None:
        ctx.xp.subtract(x, known, out=out)
    else:
        ctx.xp.add(total, x, out=out)
        out -= known


def commit(received: Array, sent: Array, worker: Array, server: Array, ctx: Context) -> None:
    """Add what was received to ``server``, which it becomes, and what was sent to ``worker``.

    Where the sum is not finite it is returned in ``received``, and nothing is remembered.
    """
    check_lengths("ef21", received.size, sent=sent, worker=worker, server=server)
    if ctx.xp is np:
        from ringlet.compressors.kernels.cpu.modifiers import state_updates

        def add(start: int, stop: int) -> None:
            at = slice(start, stop)
            state_updates.commit(received[at], sent[at], worker[at], server[at])

        run_ranges(received.size, 1, add)
    elif not _on_device("commit", ctx, sent, kept=worker, other=server, out=received):
        commit_reference(received, sent, worker, server, ctx)


def commit_reference(
    received: Array, sent: Array, worker: Array, server: Array, ctx: Context
) -> None:
    """Do what the kernel does in array code."""
    xp = ctx.xp
    with np.errstate(invalid="ignore", over="ignore"):
        total, own = server + received, worker + sent
    finite = xp.isfinite(total)
    xp.copyto(worker, own, where=finite & xp.isfinite(own))
    xp.copyto(server, total, where=finite)
    received[...] = total


def advance(
    x: Array, scale: Any, momentum: float, velocity: Array, out: Array, ctx: Context
) -> None:
    """Set ``out`` to momentum * velocity + scale * x.

    ``scale`` is a float32, or on a GPU an array of one element; None: it is 1.
    """
    check_lengths("momentum", x.size, velocity=velocity, out=out)
    weight, factor = np.float32(momentum), np.float32(1) if scale is None else scale
    if ctx.xp is np:
        from ringlet.compressors.kernels.cpu.modifiers import state_updates

        values = unlocked(x)

        def add(start: int, stop: int) -> None:
            at = slice(start, stop)
            state_updates.advance(values[at], factor, weight, velocity[at], out[at])

        run_ranges(x.size, 1, add)
    elif not _on_device("advance", ctx, x, momentum, kept=velocity, out=out, bound=scale):
        with np.errstate(invalid="ignore", over="ignore"):
            ctx.xp.multiply(velocity, weight, out=out)
            out += factor * x


def settle(advanced: Array, sent: Array, masking: bool, velocity: Array, ctx: Context) -> None:
    """Set ``velocity`` to what ``advance`` gave, with ``masking`` zero where something was sent.

    Where either is not finite the old value stays.
    """
    check_lengths("momentum", velocity.size, advanced=advanced, sent=sent)
    if ctx.xp is np:
        from ringlet.compressors.kernels.cpu.modifiers import state_updates

        def keep(start: int, stop: int) -> None:
            at = slice(start, stop)
            state_updates.settle(advanced[at], sent[at], masking, velocity[at])

        run_ranges(sent.size, 1, keep)
    elif not _on_device("settle", ctx, advanced, masking=masking, kept=velocity, other=sent):
        settle_reference(advanced, sent, masking, velocity, ctx)


def settle_reference(
    advanced: Array, sent: Array, masking: bool, velocity: Array, ctx: Context
) -> None:
    """Do what the kernel does in array code."""
    xp = ctx.xp
    kept = xp.where((sent != 0) & masking, np.float32(0), advanced)
    xp.copyto(velocity, kept, where=xp.isfinite(advanced) & xp.isfinite(sent))


def _on_device(
    kernel: str, ctx: Context, x: Array, momentum: float = 0.0, masking: bool = False,
    **arrays: Array | None,
) -> bool:  # fmt: skip
    """Run a CUDA kernel; False if there are none for these arrays."""
    if ctx.xp is np:
        return False
    from ringlet.compressors.kernels.cuda.common.operands import Operands as Memory
    from ringlet.compressors.kernels.cuda.modifiers.state_updates import run

    device = device_for(ctx)
    if device is not None:
        run(device, kernel, [Memory(x, **arrays)], momentum, masking)
    return device is not None
