"""Compressors that draw each code at random, in pure array code: see ``array_codecs``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ringlet.compressors.base.bucketed import NAN_BITS, rounded_up, widened
from ringlet.compressors.core.packing import pack_bits, unpack_bits
from ringlet.compressors.quantizers.natural import RAISED, TINY, Natural
from ringlet.compressors.quantizers.terngrad import TernGrad
from ringlet.jax.sharded.array_codecs import (
    ArrayCodec,
    Payload,
    as_rows,
    bucket_counts,
    lane_sums,
    spread,
    without_lost,
)
from ringlet.jax.sharded.counter_random import Around, squares


class PowersOfTwo(ArrayCodec):
    """``natural``: a sign and a power of two, and a bucket's highest power."""

    def __init__(self, like: Natural) -> None:
        self._bucket = like.bucket

    def encode(self, x: Any, around: Around) -> Payload:
        """Round the mantissa away."""
        rows = as_rows(x, self._bucket)
        top = (rows.view("uint32") & 0x7FFFFFFF).max(axis=1)
        finite = top < 0x7F800000
        highest = ((top + 0x7FFFFF) >> 23).astype("int32")
        tiny = (highest > 0) & (highest < TINY)
        shift = jnp.where(tiny, RAISED, jnp.clip(highest, 127, 254))
        scale = (jnp.where(finite, shift, 127).astype("uint32") << 23).view("float32")
        bits = (rows * (np.float32(1) / scale)[:, None]).view("uint32")
        noise = squares(around.own_key(), rows.size).reshape(rows.shape) >> 9
        rank = jnp.minimum(((bits & 0x7FFFFFFF) + noise) >> 23, 127)
        codes = jnp.where(finite[:, None], rank | ((bits >> 24) & 0x80), 0)
        scales = jnp.where(finite, scale.view("uint32") >> 16, NAN_BITS).astype("uint16")
        return {"codes": codes.astype("uint8").reshape(-1)[: x.size], "scales": scales}

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Decode: the power's exponent is what follows the sign bit."""
        codes = payload["codes"].astype("uint32")
        power = (((codes & 0x7F) << 23) | ((codes & 0x80) << 24)).view("float32")
        return power * spread(payload["scales"], self._bucket, n)


class Ternary(ArrayCodec):
    """``terngrad``: -s, 0 or +s, and s for each bucket."""

    def __init__(self, like: TernGrad) -> None:
        self._bucket, self._clip = like.bucket, like.clip

    def encode(self, x: Any, around: Around) -> Payload:
        """Draw codes: 0, 1 and 2 for -s, 0 and s."""
        rows = as_rows(x, self._bucket)
        largest = jnp.abs(rows).max(axis=1)
        energy = lane_sums(rows.astype("float64") ** 2)
        limit = self._clip * jnp.sqrt(energy / bucket_counts(x.size, self._bucket))
        top = jnp.minimum(largest.astype("float64"), limit).astype("float32")
        finite = jnp.isfinite(largest)
        scales = jnp.where(finite, rounded_up(top, jnp), 0).astype("uint16")
        drawn = squares(around.own_key(), rows.size).reshape(rows.shape) >> 8
        threshold = drawn.astype("float32") * np.float32(2.0**-24) * widened(scales)[:, None]
        codes = jnp.where(threshold < jnp.abs(rows), jnp.where(rows < 0, 0, 2), 1)
        packed = pack_bits(jnp, codes.astype("uint8").reshape(-1)[: x.size], 2)
        packed = without_lost(packed, finite, self._bucket * 2)
        return {"codes": packed, "scales": jnp.where(finite, scales, NAN_BITS).astype("uint16")}

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Decode: (code - 1) * s, which is exact."""
        codes = unpack_bits(jnp, payload["codes"], 2, n).astype("float32")
        return (codes - np.float32(1)) * spread(payload["scales"], self._bucket, n)
