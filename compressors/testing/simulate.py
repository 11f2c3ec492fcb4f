"""What the engine does with a compressor, in plain array code: the oracle of the kit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context, State, Workspace
from ringlet.compressors.contract import Compressor, Exchange, Payload, Round, storage


def context(x: Array, state: State | None = None, **fields: Any) -> Context:
    """Return the context of a whole tensor ``x``."""
    held = {} if state is None else state
    return Context(**{"shape": x.shape, "numel": x.size, "state": held, **fields})


def encode(compressor: Compressor, x: Array, ctx: Context) -> Payload:
    """Compress as the engine does: into preallocated arrays where the payload is of fixed size."""
    if not compressor.traits().fixed_size:
        return compressor.compress(x, ctx)
    payload: Payload = {}
    for name, dtype, elements in compressor.layout(x.size):
        # Buffers are reused, so what was in them before must not matter.
        payload[name] = np.full(elements, 77, storage(dtype))
    compressor.encode_into(x, payload, ctx)
    return payload


def decode(compressor: Compressor, payload: Payload, n: int, ctx: Context) -> Array:
    """Decompress into an array that holds garbage before."""
    out = np.full(n, np.nan, np.float32)
    compressor.decompress(payload, out, ctx)
    return out


def simulate(
    compressor: Compressor,
    gradients: Sequence[Array],
    states: Sequence[State] | None = None,
    step: int = 0,
    name: str = "tensor",
    shape: tuple[int, ...] | None = None,
    in_place: bool = False,
) -> list[Array]:
    """Return what every one of W simulated ranks has for the mean of ``gradients``.

    ``gradients`` are flat float32 arrays of one length, by rank; ``states`` what each rank
    remembers between calls; ``shape`` the tensor's, flat by default. Results of exchanges replace
    the values if they are made ``in_place``.
    """
    size, n = len(gradients), gradients[0].size
    held = states if states is not None else [{} for _ in gradients]
    # Shared as among the tensors of an engine: who keeps scratch too long finds it overwritten.
    fields: dict[str, Any] = {"shape": shape or gradients[0].shape, "workspace": Workspace()}
    fields |= {"size": size, "step": step, "name": name}
    contexts = [context(x, held[rank], rank=rank, **fields) for rank, x in enumerate(gradients)]
    now = compressor.at(step)
    traits = now.traits()
    if traits.combine == "rounds":
        outs = _rounds(now, gradients, contexts, in_place)
    else:
        scale = np.float32(1.0 / size)
        inputs = [x * scale if traits.predivide and size > 1 else x for x in gradients]
        payloads = [encode(now, x, ctx) for x, ctx in zip(inputs, contexts, strict=True)]
        if traits.combine == "sum":
            payloads = [_summed(now, payloads, n)]
        outs = []
        for ctx in contexts:
            out = decode(now, payloads[0], n, ctx)
            for payload in payloads[1:]:
                now.accumulate(payload, out, ctx)
            if not traits.predivide and size > 1:
                out *= scale
            outs.append(out)
    for out, ctx in zip(outs, contexts, strict=True):
        now.finish(out, ctx)
    return outs


def _summed(compressor: Compressor, payloads: Sequence[Payload], n: int) -> Payload:
    total: Payload = {}
    for name, dtype, _ in compressor.layout(n):
        arrays = [payload[name] for payload in payloads]
        if dtype == "bfloat16":
            wide = sum((a.astype(np.uint32) << 16).view(np.float32) for a in arrays)
            total[name] = (np.asarray(wide, np.float32).view(np.uint32) >> 16).astype(np.uint16)
            if len(arrays) == 1:
                total[name] = arrays[0]
        else:
            wide = np.sum([a.astype(np.float64) for a in arrays], axis=0)
            with np.errstate(over="ignore"):
                total[name] = np.asarray(wide).astype(arrays[0].dtype)
    return total


def _rounds(
    compressor: Compressor, gradients: Sequence[Array], contexts: Sequence[Context], in_place: bool
) -> list[Array]:
    outs = [x.copy() if in_place else np.full(x.size, np.nan, np.float32) for x in gradients]
    gradients = outs if in_place else gradients
    generators: list[Exchange] = [
        compressor.exchange(x, out, ctx)
        for x, out, ctx in zip(gradients, outs, contexts, strict=True)
    ]
    received: list[Array | None] = [None] * len(generators)
    while True:
        rounds = [_advance(g, r) for g, r in zip(generators, received, strict=True)]
        if all(r is None for r in rounds):
            return outs
        asked = [r for r in rounds if r is not None]
        alike = {(r.op, r.values.dtype, r.values.shape) for r in asked}
        assert len(asked) == len(rounds), "some ranks exchange another round, others do not"
        assert len(alike) == 1, f"ranks exchange different things in one round: {alike}"
        combined = _combine([r.values for r in asked], asked[0].op)
        received = [combined.copy() for _ in rounds]


def _advance(generator: Exchange, received: Array | None) -> Round | None:
    try:
        return next(generator) if received is None else generator.send(received)
    except StopIteration:
        return None


def _combine(arrays: Sequence[Array], op: str) -> Array:
    dtype = arrays[0].dtype
    if op == "max":
        return np.max(arrays, axis=0)  # type: ignore[no-any-return]
    wide = np.sum([a.astype(np.float64) for a in arrays], axis=0)
    if op == "mean":
        wide /= len(arrays)
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        inside = bool((wide >= limits.min).all() and (wide <= limits.max).all())
        assert inside, f"the sum of {len(arrays)} ranks overflows {dtype}"
    return np.asarray(wide).astype(dtype)
