"""The base of compressors that send codes and a bfloat16 scale per bucket with their own kernels.

``quantize`` is the family whose codes are levels at equal distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, exercise
from ringlet.compressors.errors import OptionError
from ringlet.compressors.options import option
from ringlet.compressors.packing import packed_size
from ringlet.compressors.pool import run_ranges

NAN_BITS = 0x7FC0  # the scale of a bucket that holds a NaN or Inf, which decodes to NaN
LANES = 32  # as in kernels.lanes, which is not imported here: it would load Numba
_CACHED = 1 << 16  # elements whose float32 sum stays in a core's cache


class Bucketed(Compressor):
    """Base: ``codes`` of ``bits`` bits, packed, and a scale for every bucket begun.

    Subclasses define ``compress``, ``decode_array``, and the kernels ``encoder`` and ``decoder``.
    """

    bits: int = option(8, ge=1, le=8, doc="bits of a code")
    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")

    def validate(self) -> None:
        """Buckets begin at whole bytes."""
        if self.bucket % 8:
            raise OptionError(f"{self.label()}: bucket must be a multiple of 8, got {self.bucket}")

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed codes and scales."""
        codes = Part("codes", "uint8", packed_size(n, self.bits))
        return (codes, Part("scales", "bfloat16", -(-n // self.bucket)))

    def parameter(self) -> float:
        """Return the number that the encoding kernel is given."""
        return 0.0

    def encoder(self, feedback: bool) -> Any:
        """Return ``encode(x, residual, decay, bucket, parameter, key, start, codes, scales)``.

        ``start`` is the counter of x[0] for random numbers; all slices begin at a bucket.
        """
        raise TypeError(f"{type(self).__name__} has no encoding kernel")

    def decoder(self, add: bool) -> Any:
        """Return ``decode(codes, scales, bucket, out)``; ``add`` accumulates."""
        raise TypeError(f"{type(self).__name__} has no decoding kernel")

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode in array code."""
        raise TypeError(f"{type(self).__name__} does not decode")

    # -- what these make -----------------------------------------------------------------------

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode, on a CPU with the kernel."""
        if ctx.xp is np:
            self._decode([payload], out, [self.decoder(add=False)])
        else:
            self.decode_array(payload, out, ctx)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is not np:
            return super().accumulate(payload, out, ctx)
        self._decode([payload], out, [self.decoder(add=True)])
        return None

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Decode and add all payloads piece by piece, each piece while it is in the cache."""
        if ctx.xp is not np:
            return super().sum_into(payloads, out, ctx)
        kernels = [self.decoder(add=i > 0) for i in range(len(payloads))]
        self._decode(payloads, out, kernels)
        return None

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Find the scale, encode and pack in one pass."""
        if ctx.xp is not np:
            return super().encode_into(x, payload, ctx)
        self._encode(x, x, 1.0, payload, ctx, feedback=False)
        return None

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, encode, pack and keep the error in one pass."""
        if ctx.xp is not np:
            return super().feedback_into(x, residual, decay, payload, ctx)
        self._encode(x, residual, decay, payload, ctx, feedback=True)
        return None

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)

    def rows(self, x: Array, xp: Any) -> Array:
        """Return the buckets as rows, zeros behind the last value."""
        padded: Array = xp.zeros((-(-x.size // self.bucket), self.bucket), "float32")
        padded.reshape(-1)[: x.size] = x
        return padded

    def counts(self, n: int, xp: Any) -> Array:
        """Return how many of n elements each bucket holds, as float64."""
        counts: Array = xp.full(-(-n // self.bucket), self.bucket, "float64")
        counts[-1:] = (n - 1) % self.bucket + 1
        return counts

    def spread(self, scales: Array, n: int) -> Array:
        """Return the scale (float32) of each of n elements."""
        wide: Array = (scales.astype("uint32") << 16).view("float32").repeat(self.bucket)[:n]
        return wide

    def _encode(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context,
        feedback: bool,
    ) -> None:  # fmt: skip
        kernel, bits, bucket = self.encoder(feedback), self.bits, self.bucket
        codes, scales = payload["codes"], payload["scales"]
        key, weight, parameter = np.uint64(ctx.key()), np.float32(decay), self.parameter()

        def encode(start: int, stop: int) -> None:
            part, first, last = codes[start * bits // 8 :], start // bucket, -(-stop // bucket)
            kernel(
                x[start:stop], residual[start:stop], weight, bucket, parameter, key,
                ctx.offset + start, part, scales[first:last],
            )  # fmt: skip

        run_ranges(x.size, bucket, encode)

    def _decode(self, payloads: Sequence[Payload], out: Array, kernels: Sequence[Any]) -> None:
        bits, bucket = self.bits, self.bucket
        arrays = [(payload["codes"], payload["scales"]) for payload in payloads]
        piece = max(1, _CACHED // bucket) * bucket if len(arrays) > 1 else max(out.size, 1)

        def decode(start: int, stop: int) -> None:
            for a in range(start, stop, piece):
                b = min(a + piece, stop)
                for (codes, scales), kernel in zip(arrays, kernels, strict=True):
                    part, of = codes[a * bits // 8 :], scales[a // bucket : -(-b // bucket)]
                    kernel(part, of, bucket, out[a:b])

        run_ranges(out.size, bucket, decode)


def lane_sums(rows: Array, xp: Any) -> Array:
    """Return each row's sum of float64, in the order of ``kernels.lanes``."""
    count, n = rows.shape
    lanes = xp.zeros((count, -(-n // LANES) * LANES), "float64")
    lanes[:, :n] = rows
    sums = xp.zeros((count, LANES), "float64")
    for start in range(0, n, LANES):
        sums += lanes[:, start : start + LANES]
    width = LANES // 2
    while width:
        sums[:, :width] += sums[:, width : 2 * width]
        width //= 2
    total: Array = sums[:, 0]
    return total
