"""Means over a mesh's axis of which payloads travel, inside ``jax.shard_map``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.specs.routes import Spec
from ringlet.jax.sharded.array_codecs import Around, ArrayCodec, codec_for, in_64_bits, product
from ringlet.shared.compression import as_compressor


@in_64_bits
def sharded_mean(
    x: Any,
    axis_name: str,
    compression: Spec = None,
    residual: Any = None,
    step: Any = 0,
    name: str = "tensor",
    seed: int = 0,
    reduction: str = "float32",
) -> tuple[Any, Any]:
    """Return the mean of ``x`` over the axis, of ``x``'s shape and dtype, and the next residual.

    To be called inside ``jax.shard_map``. Payloads travel by ``lax.all_gather``, and every device
    adds up what they stand for in the axis's order, in float32. Sums of what is not compressed, or
    cast to 16 bits, travel by ``lax.psum`` with ``reduction="wire"``: of 16 bits where that is what
    there is.

    ``compression`` is a spec of none, fp16, bf16, int8, int4, maxnorm, onebit, block_topk, and
    hadamard and ef behind them. With ``ef``, ``residual`` is a flat float32 array of ``x.size``
    elements, or None for zeros at first; without it the residual returned is None. ``step`` (an
    integer, or an array), ``name`` and ``seed`` decide on hadamard's signs. Payloads and means are
    those of the compressors, bit for bit. Raises ValueError for other compressors.
    """
    if reduction not in ("float32", "wire"):
        raise ValueError(f"reduction is 'float32' or 'wire', not {reduction!r}")
    compressor, feedback = as_compressor(compression), None
    if type(compressor) is ErrorFeedback and compressor.store is None and not compressor.reset:
        feedback, compressor = compressor, compressor.wrapped_compressor
    codec, around = codec_for(compressor), Around(name, step, seed)
    values, after = x.astype(jnp.float32).reshape(-1), None
    size = jax.lax.axis_size(axis_name)
    unit = np.float32(1.0 / size)
    divided = compressor.traits().predivide and size > 1
    if divided:
        values = product(values, unit)
    if feedback is not None:
        held = jnp.zeros_like(values) if residual is None else residual
        carried = held if feedback.decay == 1 else product(held, np.float32(feedback.decay))
        values = values + carried
        payload = codec.encode(values, around)
        lost = values - codec.decode(payload, values.size, around)
        after = jnp.where(jnp.isfinite(lost), lost, held)
    else:
        payload = codec.encode(values, around)
    if codec.adds and reduction == "wire":
        total = codec.decode({"values": jax.lax.psum(payload["values"], axis_name)}, x.size, around)
    else:
        total = _summed(codec, payload, values.size, axis_name, size, around)
    mean = total if divided else product(total, unit)
    return mean.reshape(x.shape).astype(x.dtype), after


def _summed(
    codec: ArrayCodec, payload: dict[str, Any], n: int, axis_name: str, size: int, around: Around
) -> Any:
    """Return the sum of what all devices' payloads stand for, in the order of the axis."""
    every = {name: jax.lax.all_gather(array, axis_name) for name, array in payload.items()}
    parts = [
        codec.decode({name: array[rank] for name, array in every.items()}, n, around)
        for rank in range(size)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
