"""``shared_int`` of many small tensors in host memory, a kernel call a round for all of them.

What becomes of a tensor is what ``SharedInt.exchange`` makes of it alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def exchange_many(
    levels: int,
    bits: int,
    bucket: int,
    stochastic: bool,
    tensors: Sequence[Exchanged],
    decay: float = 1.0,
    clip: float = 0.0,
) -> ExchangeOfMany:
    """Agree on scales (float32, one a bucket), then add the codes, integers of so many bits.

    Tensors are flat, ``bucket`` elements have a scale, and codes up to ``levels`` of each sign. All
    tensors have a residual, or none has. With ``clip`` values are quantised as ``base.norms.clip``
    returns them. Raises CompressorError for arrays with gaps, before the first round.
    """
    from ringlet.compressors.kernels.cpu.quantizers import shared_int_many as kernels

    fed_back, first = tensors[0].residual is not None, tensors[0].ctx
    sizes = [tensor.x.size for tensor in tensors]
    buckets = [-(-n // bucket) for n in sizes]
    nothing = [0] * len(sizes)
    owned, clipped = sizes if fed_back else nothing, sizes if clip else nothing
    wire, held, most = f"int{bits}", first.workspace.held, np.float32(levels)
    rooms = [*buckets, *owned, *clipped]
    with held(sum(rooms)) as scratch, held(sum(owned), wire) as codes:
        places = addresses(scratch, starts_of(rooms)).reshape(3, len(sizes))
        table = np.zeros((len(tensors), kernels.COLUMNS_OF_TABLE), np.uint64)
        table[:, kernels.N] = sizes
        table[:, kernels.VALUES] = [address(tensor.x, tensor.x.size) for tensor in tensors]
        table[:, kernels.OUT] = [address(tensor.out, tensor.x.size) for tensor in tensors]
        table[:, kernels.SCALES] = places[0]
        table[:, kernels.TARGET] = table[:, kernels.VALUES]
        if fed_back:
            table[:, kernels.TARGET] = places[1]
            table[:, kernels.CODES] = addresses(codes, starts_of(owned))
            residuals = [(t.residual, t.x.size) for t in tensors]
            table[:, kernels.RESIDUAL] = [address(each, n) for each, n in residuals]
        table[:, kernels.QUANTISED] = places[2] if clip else table[:, kernels.TARGET]
        if stochastic:
            table[:, kernels.KEY] = [tensor.ctx.key() for tensor in tensors]
            table[:, kernels.FIRST] = [tensor.ctx.offset for tensor in tensors]

        def measure(where: Array) -> None:
            kernels.measure(table, bucket, np.float32(decay), clip, where)

        largest = yield RoundOfMany(buckets, measure, "max")

        def encode(where: Array) -> None:
            kernels.encoder_of_many(stochastic, wire)(table, bucket, most, largest, where)

        sums = yield RoundOfMany(sizes, encode, "sum", wire)
        decode = kernels.decoder_of_many(wire)
        decode(table, bucket, most, np.float32(first.size), sums)
