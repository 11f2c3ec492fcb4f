"""PowerSGD and ACP-SGD of many small matrices in host memory, a kernel call a round for all.

What becomes of a matrix is what the compressor's ``exchange`` makes of it alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ringlet.compressors.base.batched import (
    Exchanged,
    ExchangeOfMany,
    RoundOfMany,
    address,
    addresses,
    starts_of,
)
from ringlet.compressors.core.context import Array
from ringlet.compressors.core.remembered import remember_rows, remembered_rows
from ringlet.compressors.lowrank.factors import SMALL, draw, revived


def exchange_many(
    rank: int, warm_start: bool, tensors: Sequence[Exchanged], decay: float = 1.0
) -> ExchangeOfMany:
    """Average first factors (rank x n), then second ones (rank x m), as PowerSGD does.

    Tensors are matrices of n x m elements, the n being the first of the context's shape. All have
    a residual, or none has. Raises CompressorError for arrays with gaps, before the first round.
    """
    from ringlet.compressors.kernels.cpu.lowrank import powersgd_many as kernels

    table, targets = _table(tensors)
    rows, columns = table[:, kernels.N].astype(int), table[:, kernels.M].astype(int)
    # Scratch of each: the basis, the own factor, what it may begin with, the sum with the residual.
    parts = [rank * rows, rank * columns, rank * columns, targets]
    starts = starts_of(np.concatenate(parts)).reshape(len(parts), len(tensors))
    with tensors[0].ctx.workspace.held(sum(int(part.sum()) for part in parts)) as scratch:
        places = addresses(scratch, starts.ravel()).reshape(starts.shape)
        others = []  # by place: what the next step begins with, where this one does not
        for i, (_, _, ctx, _) in enumerate(tensors):
            start = room = known = _matrix(scratch, starts[2, i], rank, columns[i])
            if warm_start:
                known = remembered_rows("right", room, draw, ctx)
                start = known if known is room else revived(known, room, ctx)
            else:
                draw(room, ctx)
            if start is room:
                others.append((i, known))
            table[i, kernels.START] = start.ctypes.data
        if targets.any():
            table[:, kernels.TARGET] = places[3]
        table[:, kernels.BASIS], table[:, kernels.OWN] = places[0], places[1]
        poisons, weight = np.empty(len(tensors), np.float32), np.float32(decay)
        lengths: list[Sequence[int]] = [parts[0].tolist(), parts[1].tolist()]

        means = yield RoundOfMany(lengths[0], partial(kernels.first_factors, table, rank, weight))

        def second(where: Array, means: Array = means) -> None:
            kernels.second_factors(table, rank, SMALL, means, where, poisons)

        means = yield RoundOfMany(lengths[1], second)
        if warm_start:
            for i, known in others:
                kept = remember_rows("right", known, tensors[i].ctx)
                table[i, kernels.START] = kept.ctypes.data
        kernels.results(table, rank, warm_start, means, poisons)


def exchange_in_turn(rank: int, tensors: Sequence[Exchanged], decay: float = 1.0) -> ExchangeOfMany:
    """Average left factors (rank x n) in even steps, right ones (rank x m) in odd, as ACP-SGD does.

    Tensors are matrices of n x m elements, the n being the first of the context's shape; they need
    not be at the same step. All have a residual, or none has. Raises CompressorError for arrays
    with gaps, before the first round.
    """
    from ringlet.compressors.kernels.cpu.lowrank import powersgd_many as kernels

    table, targets = _table(tensors)
    left = np.array([ctx.step % 2 == 0 for _, _, ctx, _ in tensors])
    rows, columns = table[:, kernels.N].astype(int), table[:, kernels.M].astype(int)
    sent, fixed = np.where(left, (rows, columns), (columns, rows))
    # Scratch of each: the basis, the own factor, what both may begin with, the sum with the
    # residual.
    parts = [rank * fixed, rank * sent, rank * fixed, rank * sent, targets]
    starts = starts_of(np.concatenate(parts)).reshape(len(parts), len(tensors))
    with tensors[0].ctx.workspace.held(sum(int(part.sum()) for part in parts)) as scratch:
        places = addresses(scratch, starts.ravel()).reshape(starts.shape)
        known = []
        for i, (_, _, ctx, _) in enumerate(tensors):
            names = ("right", "left") if left[i] else ("left", "right")
            room = _matrix(scratch, starts[2, i], rank, fixed[i])
            first = remembered_rows(names[0], room, draw, ctx)
            room = _matrix(scratch, starts[3, i], rank, sent[i])
            # Numbers of their own: the same as in the other factor would be no guess at all.
            second = remembered_rows(names[1], room, partial(draw, stream=1), ctx)
            known.append((names, first, second))
            table[i, kernels.START] = first.ctypes.data
        if targets.any():
            table[:, kernels.TARGET] = places[4]
        table[:, kernels.BASIS], table[:, kernels.OWN] = places[0], places[1]
        table[:, kernels.LEFT] = left
        write = partial(kernels.factors_in_turn, table, rank, SMALL, np.float32(decay))

        means = yield RoundOfMany(parts[1].tolist(), write)

        for i, (names, first, second) in enumerate(known):
            remember_rows(names[0], first, tensors[i].ctx)
            kept = remember_rows(names[1], second, tensors[i].ctx)
            table[i, kernels.KEPT] = kept.ctypes.data
        kernels.results_in_turn(table, rank, means)


def _table(tensors: Sequence[Exchanged]) -> tuple[Array, Array]:
    """Return what kernels are told of matrices and residuals, and each one's room for their sum.

    Without residuals, none: the matrix itself is approximated.
    """
    from ringlet.compressors.kernels.cpu.lowrank import powersgd_many as kernels

    table = np.zeros((len(tensors), kernels.COLUMNS_OF_TABLE), np.uint64)
    sizes = np.array([x.size for x, _, _, _ in tensors])
    table[:, kernels.N] = [ctx.shape[0] for _, _, ctx, _ in tensors]
    table[:, kernels.M] = sizes // table[:, kernels.N].astype(int)
    table[:, kernels.MATRIX] = [address(x, x.size) for x, _, _, _ in tensors]
    table[:, kernels.OUT] = [address(out, x.size) for x, out, _, _ in tensors]
    table[:, kernels.TARGET] = table[:, kernels.MATRIX]
    if tensors[0].residual is None:
        return table, 0 * sizes
    table[:, kernels.RESIDUAL] = [address(held, x.size) for x, _, _, held in tensors]
    return table, sizes


def _matrix(scratch: Array, start: int, rows: int, columns: int) -> Array:
    return scratch[start : start + rows * columns].reshape(rows, columns)
