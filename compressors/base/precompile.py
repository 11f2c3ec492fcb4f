"""Running everything that a compressor does once, so that its kernels are compiled."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np

from ringlet.compressors.base.batched import (
    LENGTH,
    Exchanged,
    ExchangeOfMany,
    addresses,
    starts_of,
)
from ringlet.compressors.base.contract import Compressor, encoded
from ringlet.compressors.base.payload_bytes import PayloadBytes, split
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.multitensor import Decoding, Encoding, Spaced
from ringlet.compressors.core.traits import Exchange, Payload


def precompile(compressor: Compressor, ctx: Context) -> None:
    """Run every method once on a few values: what ``warm_up`` does where kernels compile."""
    x, out = ctx.xp.ones(64, "float32"), ctx.xp.zeros(64, "float32")
    ctx = Context(shape=(64,), numel=64, xp=ctx.xp, workspace=ctx.workspace)
    if compressor.traits().combine == "rounds":
        rehearse(compressor.exchange(x, out, ctx))
        rehearse_together(compressor, Exchanged(x, out, ctx, ctx.xp.zeros(64, "float32")))
        return
    payload = encoded(compressor, x, ctx)
    compressor.decompress(payload, out, ctx)
    compressor.accumulate(payload, out, ctx)
    compressor.finish(out, ctx)
    precompile_many(compressor, payload, ctx)
    precompile_batched(compressor, x, payload, ctx)
    if compressor.traits().stateful:
        return
    if compressor.traits().fixed_size:
        compressor.feedback_into(x, out, 1.0, payload, ctx)
    else:
        compressor.compress_feedback(x, out, 1.0, ctx)


def rehearse(rounds: Exchange) -> None:
    """Run an exchange of one rank, which receives what it sends."""
    asked = next(rounds)
    with suppress(StopIteration):
        while True:
            asked = rounds.send(asked.values)


def rehearse_together(compressor: Compressor, tensor: Exchanged) -> None:
    """Run what exchanges many tensors in host memory together, if anything does."""
    together = compressor.batched_rounds() if tensor.ctx.xp is np else None
    if together is None or not together.takes(tensor.ctx.shape):
        return
    _rehearse_many(together.exchange([tensor._replace(residual=None)]))
    if together.exchange_fed is not None:
        _rehearse_many(together.exchange_fed([tensor], 1.0))


def _rehearse_many(rounds: ExchangeOfMany) -> None:
    before: list[Array] = []  # what a round writes is read while the next one is written
    asked = next(rounds)
    with suppress(StopIteration):
        while True:
            values = np.empty(sum(asked.lengths), asked.dtype)
            places = addresses(values, starts_of(asked.lengths))
            asked.write(places)
            before = [*before[-1:], values]
            asked = rounds.send(places)


def precompile_batched(compressor: Compressor, x: Array, payload: Payload, ctx: Context) -> None:
    """Run kernels that take many tensors in host memory, if there are any."""
    kernels = compressor.batched() if ctx.xp is np else None
    if kernels is not None:
        if kernels.varies:
            payload = {p.name: np.empty(p.elements, p.dtype) for p in kernels.layout(x.size)}
        table = kernels.table([payload], [x.size])
        for stage in (1, 2):  # in one of them residuals may be fed back
            row = kernels.values(x, dataclasses.replace(ctx, stage=stage))
            kernels.encode_into([row], table)
        if kernels.varies:
            as_bytes = PayloadBytes(kernels.layout(1))
            written, _ = as_bytes.write(table)
            starts = split(written, 1)
            assert starts is not None, "it was written just now"
            as_bytes.read(written, starts, table[:, LENGTH])
        kernels.sum_into([row[0]], [table], rows=[kernels.decode_row(x.size, ctx)])
        if kernels.finishing is not None:
            rows = np.array([kernels.finishing.row(x.size, ctx)], np.uint64)
            places = np.array([row[0]], np.uint64)
            kernels.finishing.finish(rows, np.array([x.size], np.uint64), places, places)


def precompile_many(compressor: Compressor, payload: Payload, ctx: Context) -> None:
    """Run multi-tensor kernels, if there are any, in every way once: on 64 values."""
    kernels, traits = compressor.multi_tensor(ctx), compressor.traits()
    if kernels is None:
        return
    for dtype in ("float32", "float16", "uint16"):
        x, out = ctx.xp.ones(64, dtype), ctx.xp.zeros(64, dtype)
        kernels.encode([Encoding(x, 64, payload, ctx)])
        kernels.decode([Decoding(out, payload, ctx)])
    if traits.combine == "gather" and traits.granularity is not None:
        again = {name: ctx.xp.empty_like(array) for name, array in payload.items()}
        owner = dataclasses.replace(ctx, stage=2)
        kernels.encode([Encoding(None, 64, again, owner, payload)], Spaced(1, 0))
