"""Compressors in pure array code, which XLA compiles: their payloads are the kernels', bit for bit.

XLA contracts a product and a sum to one operation with one rounding, and kernels do not. So where
a product is added to something it is exact here, or rounded by ``product``. All this is traced with
64-bit types switched on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from ringlet.compressors.base.bucketed import NAN_BITS, rounded, rounded_up, widened
from ringlet.compressors.core.packing import pack_bits, packed_size, unpack_bits
from ringlet.compressors.quantizers.onebit import OneBit
from ringlet.compressors.quantizers.quantize import QSGD, BucketQuantizer
from ringlet.compressors.sparsifiers.blocktopk import BlockTopK
from ringlet.jax.sharded.counter_random import Around, squares

Payload = dict[str, Any]

_TINY = np.float32(1.5e-36)
_NO_VALUE = np.uint32(0x7FC05EED)  # a NaN that no arithmetic makes


class ArrayCodec(ABC):
    """A compressor as functions of flat float32 arrays of n elements."""

    adds = False  # whether payloads are summed rather than decoded one by one

    @abstractmethod
    def encode(self, x: Any, around: Around) -> Payload:
        """Return the payload's arrays."""

    @abstractmethod
    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Return the n values that a payload stands for."""


class Plain(ArrayCodec):
    """Values as they are, or cast to 16 bits."""

    adds = True

    def __init__(self, dtype: Any) -> None:
        self._dtype = dtype

    def encode(self, x: Any, around: Around) -> Payload:
        """Round to nearest, ties to even."""
        return {"values": x.astype(self._dtype)}

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Widen."""
        return payload["values"].astype(jnp.float32)


class BucketCodes(ArrayCodec):
    """``maxnorm`` and ``qsgd``: codes of 2 to 8 bits, and a bfloat16 scale for each bucket."""

    def __init__(self, like: BucketQuantizer) -> None:
        self._bits, self._bucket, self._levels = like.bits, like.bucket, like.levels
        self._at_random, self._norm = like.stochastic, type(like) is QSGD

    def encode(self, x: Any, around: Around) -> Payload:
        """Quantise: code = zero + round(x / scale), to nearest or at random."""
        rows, zero = as_rows(x, self._bucket), np.float32(self._levels)
        extent = _norms(rows) if self._norm else jnp.abs(rows).max(axis=1)
        finite = jnp.isfinite(extent)
        usable = finite & (extent >= _TINY)
        scales = jnp.where(usable, rounded_up(extent / zero, jnp), 0)
        inverse = np.float32(1) / widened(jnp.where(usable, scales, 0x3F80))[:, None]
        if self._at_random:
            drawn = squares(around.own_key(), rows.size).reshape(rows.shape) >> 16
            steps = drawn.astype("float32") * np.float32(2.0**-16)
            raised = (product(rows, inverse) + zero) + steps
            codes = jnp.trunc(jnp.minimum(raised, np.float32(2 * self._levels)))
        else:
            codes = jnp.rint(rows * inverse) + zero
        codes = jnp.where(usable[:, None], codes, zero)
        codes = jnp.where(finite[:, None], codes, 0).astype("uint8").reshape(-1)[: x.size]
        packed = without_lost(pack_bits(jnp, codes, self._bits), finite, self._bucket * self._bits)
        return {"codes": packed, "scales": jnp.where(finite, scales, NAN_BITS).astype("uint16")}

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Decode: (code - zero) * scale, which is exact."""
        codes = unpack_bits(jnp, payload["codes"], self._bits, n).astype("float32")
        return (codes - np.float32(self._levels)) * spread(payload["scales"], self._bucket, n)


class SignBits(ArrayCodec):
    """``onebit``: signs, and each bucket's mean magnitude."""

    def __init__(self, like: OneBit) -> None:
        self._bucket = like.bucket

    def encode(self, x: Any, around: Around) -> Payload:
        """Take signs; zero counts as positive."""
        rows = as_rows(x, self._bucket)
        counts = bucket_counts(x.size, self._bucket)
        mean = (lane_sums(jnp.abs(rows).astype("float64")) / counts).astype("float32")
        finite = jnp.isfinite(mean)
        codes = ((rows < 0) & finite[:, None]).astype("uint8").reshape(-1)[: x.size]
        scales = jnp.where(finite, rounded(mean, jnp), NAN_BITS).astype("uint16")
        return {"codes": pack_bits(jnp, codes, 1), "scales": scales}

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Put the signs to the scales."""
        negative = unpack_bits(jnp, payload["codes"], 1, n)
        scale = spread(payload["scales"], self._bucket, n)
        return jnp.where(negative, -scale, scale)


class Largest(ArrayCodec):
    """``block_topk`` with values of 32 or 16 bits."""

    def __init__(self, like: BlockTopK) -> None:
        self._block, self._kept, self._width, self._bits = (
            like.block, like.kept, like.width, like.bits,
        )  # fmt: skip
        self._name = "values" if like.bits == 32 else "codes"

    def encode(self, x: Any, around: Around) -> Payload:
        """Select the largest entries of full blocks, then of the last one."""
        pieces = []
        for start, rows, length, k in self._parts(x.size):
            values = x[start : start + rows * length].reshape(rows, length)
            bits = (values.view("uint32") & 0x7FFFFFFF).astype("int32")
            order = jnp.argsort(-bits, axis=1, stable=True)[:, :k]
            picks = jnp.sort(order, axis=1)
            chosen = jnp.take_along_axis(values, picks, axis=1).reshape(-1)
            if self._bits == 16:
                chosen = _bfloat16_bits(chosen)
            pieces.append({"indices": self._packed(picks), self._name: chosen})
        return {name: jnp.concatenate([p[name] for p in pieces]) for name in pieces[0]}

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Put the values at their places among zeros."""
        done, first, behind = [], 0, 0
        for _, rows, length, k in self._parts(n):
            size = packed_size(k * self._width, 1)
            packed = payload["indices"][first : first + rows * size].reshape(rows, size)
            values = payload[self._name][behind : behind + rows * k].reshape(rows, k)
            if self._bits == 16:
                values = widened(values)
            dense = jnp.zeros((rows, length), "float32")
            places = self._unpacked(packed, k)
            done.append(dense.at[jnp.arange(rows)[:, None], places].set(values).reshape(-1))
            first, behind = first + rows * size, behind + rows * k
        return jnp.concatenate(done)

    def _parts(self, n: int) -> list[tuple[int, int, int, int]]:
        """Return (start, rows, elements of a row, entries of a row) of what is not empty."""
        full, last = divmod(n, self._block)
        parts = [
            (0, full, self._block, self._kept),
            (full * self._block, 1, last, -(-self._kept * last // self._block)),
        ]
        return [part for part in parts if part[1] * part[2]]

    def _packed(self, picks: Any) -> Any:
        rows, k = picks.shape
        wide = jnp.pad(picks, ((0, 0), (0, k % 2))).astype("uint32")
        if self._width == 12:
            first, second = wide[:, 0::2], wide[:, 1::2]
            cells = [first & 255, (first >> 8) | ((second & 15) << 4), second >> 4]
        else:
            cells = [wide & 255, wide >> 8][: self._width // 8]
        packed = jnp.stack(cells, axis=2).astype("uint8").reshape(rows, -1)
        return packed[:, : packed_size(k * self._width, 1)].reshape(-1)

    def _unpacked(self, packed: Any, k: int) -> Any:
        wide = packed.astype("int32")
        if self._width == 8:
            return wide
        if self._width == 16:
            return wide[:, 0::2] | (wide[:, 1::2] << 8)
        place = np.arange(k)
        both = wide[:, place * 3 // 2] | (wide[:, place * 3 // 2 + 1] << 8)
        return jnp.where(place % 2 == 1, both >> 4, both & 4095)


class Rotated(ArrayCodec):
    """``hadamard``: what is within sees values whose blocks are rotated."""

    def __init__(self, inner: ArrayCodec, block: int) -> None:
        self._inner, self._block = inner, block

    def encode(self, x: Any, around: Around) -> Payload:
        """Rotate and encode."""
        return self._inner.encode(self._transformed(x * self._signs(x.size, around)), around)

    def decode(self, payload: Payload, n: int, around: Around) -> Any:
        """Decode and rotate back."""
        return self._transformed(self._inner.decode(payload, n, around)) * self._signs(n, around)

    def _signs(self, n: int, around: Around) -> Any:
        group = min(self._block, 2048)  # elements whose signs come from 64 random numbers
        words = squares(around.shared_key(), 64 * -(-n // group)).reshape(-1, 1, 64)
        places = jnp.arange(group // 64, dtype="uint32")[:, None]
        bits = (words >> places) & 1
        return 1 - 2 * bits.reshape(-1)[:n].astype("float32")

    def _transformed(self, x: Any) -> Any:
        done, start, size = [], 0, self._block
        while start < x.size:
            while size > x.size - start:
                size //= 2
            stop = start + (x.size - start) // size * size
            rows = product(x[start:stop].reshape(-1, size), np.float32(1.0 / math.sqrt(size)))
            half = 1
            while half < size:
                pairs = rows.reshape(-1, 2, half)
                rows = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
                half *= 2
            done.append(rows.reshape(-1))
            start = stop
        return jnp.concatenate(done)


def in_64_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that traces 64-bit types, whatever the program's own are."""
    # The latter is where it was before JAX 0.8.
    switched: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with switched(True):
            return function(*args, **kwargs)

    return traced


def product(x: Any, factor: Any) -> Any:
    """Return x * factor (float32), rounded before anything is added to it.

    Compilers see through casts to double precision and back, not through what depends on bits.
    """
    odd = (x.view("uint32") == _NO_VALUE).astype("uint32")
    return ((x * factor).view("uint32") ^ odd).view("float32")


def as_rows(x: Any, bucket: int) -> Any:
    """Return the buckets as rows, zeros behind the last value."""
    return jnp.pad(x, (0, -x.size % bucket)).reshape(-1, bucket)


def spread(scales: Any, bucket: int, n: int) -> Any:
    """Return each element's scale (float32), of one for each bucket."""
    return widened(scales).repeat(bucket)[:n]


def without_lost(packed: Any, finite: Any, bits: int) -> Any:
    """Return packed codes (uint8), zeros for buckets (of ``bits``) that are not ``finite``."""
    kept = finite.repeat(bits // 8)[: packed.size]
    return jnp.where(kept, packed, 0).astype("uint8")


def bucket_counts(n: int, bucket: int) -> Any:
    """Return how many of ``n`` elements are in each bucket, as float64."""
    counts = np.full(-(-n // bucket), bucket, np.float64)
    counts[-1:] = (n - 1) % bucket + 1
    return counts


def _norms(rows: Any) -> Any:
    """Return each row's Euclidean norm, summed in eight lanes of float64 as the kernels do."""
    lanes = (rows.astype("float64") ** 2).reshape(len(rows), -1, 8)
    sums = lanes[:, 0]
    for i in range(1, lanes.shape[1]):
        sums = sums + lanes[:, i]
    total = sums[:, 0]
    for j in range(1, 8):
        total = total + sums[:, j]
    return jnp.sqrt(total).astype("float32")


def _bfloat16_bits(values: Any) -> Any:
    raw = values.view("uint32")
    nearest = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return jnp.where(jnp.isnan(values), (raw >> 16) | 0x40, nearest).astype("uint16")


def lane_sums(rows: Any) -> Any:
    """Return each row's sum in the order of ``lane_sums``."""
    count, n = rows.shape
    lanes = jnp.pad(rows, ((0, 0), (0, -n % 32))).reshape(count, -1, 32)
    sums = lanes[:, 0]
    for i in range(1, lanes.shape[1]):
        sums = sums + lanes[:, i]
    width = 16
    while width:
        sums = sums[:, :width] + sums[:, width : 2 * width]
        width //= 2
    return sums[:, 0]
