"""PowerSGD of many small matrices in host memory, a kernel call a round for all of them.

What becomes of a matrix is what ``PowerSGD.exchange`` makes of it alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ringlet.compressors.base.batched import Exchanged, ExchangeOfMany, RoundOfMany, address
from ringlet.compressors.core.context import Array
from ringlet.compressors.core.remembered import remember_rows, remembered_rows
from ringlet.compressors.lowrank.factors import SMALL, draw

_FLOAT = 4  # bytes


def exchange_many(
    rank: int, warm_start: bool, tensors: Sequence[Exchanged], decay: float = 1.0
) -> ExchangeOfMany:
    """Average first factors (rank x n), then second ones (rank x m), as PowerSGD does.

    Tensors are matrices of n x m elements, the n being the first of the context's shape. All have
    a residual, or none has. Raises CompressorError for arrays with gaps, before the first round.
    """
    from ringlet.compressors.kernels.cpu.lowrank import many as kernels

    fed_back = tensors[0].residual is not None
    workspace = tensors[0].ctx.workspace
    rows = np.array([ctx.shape[0] for _, _, ctx, _ in tensors])
    sizes = np.array([x.size for x, _, _, _ in tensors])
    columns = sizes // rows
    # Scratch of each: the basis, the own factor, what it may begin with, the sum with the residual.
    parts = [rank * rows, rank * columns, rank * columns, sizes if fed_back else 0 * sizes]
    ends = np.cumsum(np.concatenate(parts))
    with workspace.held(int(ends[-1])) as scratch:
        begins = np.concatenate([[0], ends[:-1]]).reshape(len(parts), len(tensors))
        places = begins.astype(np.uint64) * _FLOAT + np.uint64(address(scratch, scratch.size))
        starts, drawn = [], []
        for i, (_, _, ctx, _) in enumerate(tensors):
            m = int(columns[i])
            room = scratch[begins[2, i] : begins[2, i] + rank * m].reshape(rank, m)
            if warm_start:
                start = remembered_rows("right", room, draw, ctx)
            else:
                draw(room, ctx)
                start = room
            if start is room:
                drawn.append((i, room))
            starts.append(start.ctypes.data if start is not room else int(places[2, i]))
        table = np.empty((len(tensors), kernels.COLUMNS_OF_TABLE), np.uint64)
        table[:, kernels.N], table[:, kernels.M] = rows, columns
        table[:, kernels.MATRIX] = [address(x, x.size) for x, _, _, _ in tensors]
        table[:, kernels.OUT] = [address(out, out.size) for _, out, _, _ in tensors]
        held = [0 if r is None else address(r, r.size) for _, _, _, r in tensors]
        table[:, kernels.RESIDUAL] = held
        table[:, kernels.TARGET] = places[3] if fed_back else table[:, kernels.MATRIX]
        table[:, kernels.START] = starts
        table[:, kernels.BASIS], table[:, kernels.OWN] = places[0], places[1]
        poisons = np.empty(len(tensors), np.float32)
        weight = np.float32(decay)
        lengths: list[Sequence[int]] = [parts[0].tolist(), parts[1].tolist()]

        means = yield RoundOfMany(lengths[0], partial(kernels.first_factors, table, rank, weight))

        def second(where: Array, means: Array = means) -> None:
            kernels.second_factors(table, rank, SMALL, means, where, poisons)

        means = yield RoundOfMany(lengths[1], second)
        if warm_start:
            for i, room in drawn:
                kept = remember_rows("right", room, tensors[i].ctx)
                table[i, kernels.START] = kept.ctypes.data
        kernels.results(table, rank, warm_start, means, poisons)
