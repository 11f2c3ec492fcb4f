"""Factors of low-rank approximations: kernels on CPU and GPU, array code elsewhere.

Factors are held as rows, r x n. Every rank gets the same bits from the same rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.lengths import check_shapes

# A row that keeps less of its length than this beside those before it is not independent.
SMALL = 1e-9


def draw(rows: Array, ctx: Context, stream: int = 0) -> None:
    """Fill ``rows`` with Gaussian numbers, the same on all ranks, others in another stream."""
    rng = ctx.rng(shared=True, stream=stream)
    if ctx.xp is np:
        rng.standard_normal(dtype=np.float32, out=rows)
    else:
        rows[...] = ctx.xp.asarray(rng.standard_normal(rows.shape, dtype=np.float32))


def revived(rows: Array, room: Array, ctx: Context) -> Array:
    """Return ``rows`` (r x m, float32), or ``room`` with what they are and columns of zeros drawn.

    What a column of zeros is multiplied with is never seen, whatever it is by now: such as a block
    of the matrix that was all zeros when the rows were made. Ranks draw the same.
    """
    xp = ctx.xp
    if xp is np and (rows[0].all() or rows.any(axis=0).all()):
        return rows
    fresh = ctx.uniform(rows.size, shared=True).reshape(rows.shape) - np.float32(0.5)
    room[...] = xp.where(rows.any(axis=0), rows, fresh)
    return room


def poison_of(rows: Array, ctx: Context) -> Any:
    """Return 0 (float32), or NaN where a value is not finite: what adds it to a result shows it."""
    if ctx.xp is np:
        from ringlet.compressors.kernels.cpu.lowrank import factors as kernels

        return np.float32(kernels.poison_of(rows))
    device = device_for(ctx)
    if device is not None:
        from ringlet.compressors.kernels.cuda.lowrank import factors as cuda

        poison = ctx.xp.empty(1, "float32")  # not scratch: it is needed after the next round
        cuda.inspect(device, [cuda.Rows(rows, poison=poison)])
        return poison
    with np.errstate(invalid="ignore"):
        return ctx.xp.abs(rows).max() * np.float32(0)


def keep(rows: Array, poison: Any, old: Array, ctx: Context) -> None:
    """Set ``old`` to what to begin the next step with: the rows, scaled to a largest value of 1.

    A row of zeros would stay zero for ever, so the old one is kept; all are if one is not finite,
    or if ``poison`` is not, where there is one.
    """
    check_shapes("a factor to keep", old=(old, rows.shape))
    xp = ctx.xp
    if xp is np:
        from ringlet.compressors.kernels.cpu.lowrank import factors as kernels

        kernels.keep(rows, np.float32(0) if poison is None else poison, old)
        return
    device = device_for(ctx)
    if device is not None:
        from ringlet.compressors.kernels.cuda.lowrank import factors as cuda

        both = ctx.workspace.array("poison", 1)
        cuda.inspect(device, [cuda.Rows(rows, poison=both, add=poison)])
        cuda.keep(device, [cuda.Rows(rows, old, both)])
        return
    poison = np.float32(0) if poison is None else poison
    top = xp.abs(rows).max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        usable = xp.isfinite(top.max() + poison) & (top > 0)
        scaled = rows / xp.where(usable, top, np.float32(1))
    xp.copyto(old, scaled, where=usable)


def orthonormal(rows: Array, out: Array, ctx: Context) -> None:
    """Fill ``out`` with an orthonormal basis (float32) of the rows; what is not finite is 0."""
    check_shapes("an orthonormal basis", out=(out, rows.shape))
    if rows.shape[0] > rows.shape[1]:
        raise CompressorError(f"{rows.shape[0]} rows of {rows.shape[1]} elements have no basis")
    xp, device = ctx.xp, device_for(ctx)
    if device is not None:
        from ringlet.compressors.kernels.cuda.lowrank import factors as cuda

        cuda.orthonormal(device, [cuda.Rows(rows, out)], SMALL, ctx.workspace.array)
        return
    if xp is not np:
        out[...] = orthonormal_reference(xp, xp.where(xp.isfinite(rows), rows, np.float32(0)))
        return
    from ringlet.compressors.kernels.cpu.lowrank import factors as kernels

    r, n = rows.shape
    room = ctx.workspace.array("orthonormal", (r + 1) * n + r, np.float64)
    kernels.orthonormal(rows, SMALL, room, out)


def orthonormal_reference(xp: Any, rows: Array) -> Array:
    """Do the same for finite rows in array code."""
    basis, unit = rows.astype("float64"), 0
    for k in range(len(basis)):
        while True:
            row = basis[k]
            before = xp.sqrt(_folded(row * row))
            for _ in range(2):
                parts = _folded(basis[:k] * row)
                for j in range(k):
                    row -= parts[j] * basis[j]
            norm = xp.sqrt(_folded(row * row))
            if norm > SMALL * before:
                break
            row[...] = 0
            row[unit] = 1
            unit += 1
        row /= norm
    out: Array = basis.astype("float32")
    return out


def _folded(terms: Array) -> Array:
    """Return the sums over the last axis, adding its second half onto the first."""
    n = terms.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        terms[..., : n - half] += terms[..., half:n]
        n = half
    return terms[..., 0]
