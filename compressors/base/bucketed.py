"""The base of compressors with kernels that work bucket by bucket; quantisers among them.

A bucket is compressed by itself, so kernels run over ranges of buckets on several threads, and a
payload may be cut there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.contract import Compressor, Part, Payload, keeps
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import OptionError, PayloadError
from ringlet.compressors.core.lengths import check_lengths, check_parts
from ringlet.compressors.core.multitensor import MultiTensor
from ringlet.compressors.core.options import option
from ringlet.compressors.core.packing import packed_size
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec
    from ringlet.compressors.kernels.cuda.runtime.device import Device

Kernel = Callable[..., Any]

NAN_BITS = 0x7FC0  # the scale of a bucket that holds a NaN or Inf, which decodes to NaN
LANES = 32  # as in kernels.cpu.common.ordered_sums, which is not imported here: it would load Numba
_CACHED = 1 << 16  # elements whose float32 sum stays in a core's cache


_NOTHING = np.empty(0, np.float32)


class Bucketed(Compressor):
    """Base: kernels do everything; without any for a device, ``compress`` and ``decode_array``.

    Subclasses define those two, ``granule``, ``strides``, and the CPU kernels ``encoder`` and
    ``decoder``, which get the payload's arrays in the order of ``strides``; ``cuda`` names the
    kernels for CuPy arrays.
    """

    @property
    def granule(self) -> int:
        """Elements of a bucket."""
        raise TypeError(f"{type(self).__name__} does not say how many elements a bucket has")

    def strides(self) -> dict[str, int]:
        """Return how many elements of each array of the payload belong to a whole bucket.

        0: the array is what all buckets share, which ``measure`` fills in.
        """
        raise TypeError(f"{type(self).__name__} does not say what a bucket becomes")

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """Return ``encode(x, residual, decay, key, start, *arrays)`` for whole buckets and a tail.

        ``start`` is the counter of x[0] for random numbers. With ``feedback`` x + decay * residual
        is encoded, and what that loses kept in ``residual`` where it is finite.
        """
        raise TypeError(f"{type(self).__name__} has no encoding kernel")

    def draws(self) -> bool:
        """Whether encoding kernels draw random numbers: others are given a key of 0."""
        return True

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """Return ``decode(*arrays, out)``; ``add`` accumulates. False: the arrays make no sense."""
        raise TypeError(f"{type(self).__name__} has no decoding kernel")

    def measure(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Fill in what all buckets share, of x + decay * residual, on the CPU: there is nothing."""

    def cuda(self) -> BucketedCodec | None:
        """Return the CUDA kernels for these options; None: there are none."""
        return None

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode in array code."""
        raise TypeError(f"{type(self).__name__} does not decode")

    # -- what these make -----------------------------------------------------------------------

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode, with a kernel if there is one for ``ctx.xp``."""
        if ctx.xp is np:
            self._decode([payload], out, [self.decoder(add=False, ctx=ctx)])
        elif not self.decode_on_device([payload], out, ctx):
            self.decode_array(payload, out, ctx)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is not np:
            if not self.decode_on_device([payload], out, ctx, add=True):
                super().accumulate(payload, out, ctx)
            return
        self._decode([payload], out, [self.decoder(add=True, ctx=ctx)])
        return

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Decode and add all payloads piece by piece, each piece while it is in the cache."""
        if ctx.xp is not np:
            if not self.decode_on_device(payloads, out, ctx):
                super().sum_into(payloads, out, ctx)
            return
        write, add = self.decoder(add=False, ctx=ctx), self.decoder(add=True, ctx=ctx)
        self._decode(payloads, out, [write, *[add] * (len(payloads) - 1)])
        return

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Encode and pack in one pass."""
        if ctx.xp is not np:
            if not self._encode_on_device(x, None, 1.0, payload, ctx):
                super().encode_into(x, payload, ctx)
            return
        # Not x: a kernel may be written to change what it is given, and x may be read-only.
        self._check(x.size, [payload])
        self.measure(x, None, 1.0, payload, ctx)
        self._encode(x, _NOTHING, 1.0, payload, ctx, self.encoder(feedback=False, ctx=ctx))
        return

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, encode, pack and keep the error in one pass."""
        if ctx.xp is not np:
            if not self._encode_on_device(x, residual, decay, payload, ctx):
                super().feedback_into(x, residual, decay, payload, ctx)
            return
        self._check(x.size, [payload], residual)
        self.measure(x, residual, decay, payload, ctx)
        self._encode(x, residual, decay, payload, ctx, self.encoder(feedback=True, ctx=ctx))
        return

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        precompile(self, ctx)

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """The same kernels, over many tensors; none for a subclass that does not rely on them."""
        found = self._device(ctx) if self.relies_on_kernels() and ctx.xp is not np else None
        if found is None:
            return None
        from ringlet.compressors.kernels.cuda.common.multitensor import Buckets

        return Buckets(*found, self.strides())

    def relies_on_kernels(self) -> bool:
        """Whether the methods here run the kernels, and none of a subclass does something else."""
        return keeps(self, Bucketed, "encode_into", "feedback_into", "decompress", "sum_into")

    def looped(
        self,
        encoder: Callable[[bool], Kernel],
        decoder: Kernel,
        options: Callable[[], tuple[Any, ...]],
    ) -> Batched:
        """Return kernels for many tensors a call: loops around ones for a tensor.

        ``encoder(feedback)``, ``decoder`` and their ``options``, which are made for each call, are
        as ``kernels.cpu.common.batched`` has them.
        """
        from ringlet.compressors.kernels.cpu.common.batched import batch_decoder, batch_encoder

        plain, fed = (batch_encoder(encoder(feedback)) for feedback in (False, True))
        decode = batch_decoder(decoder)
        return Batched(
            self.label,
            self.layout,
            tuple(self.strides()),
            lambda *tables: plain(*tables, options()),
            lambda *tables: fed(*tables, options()),
            lambda *tables: decode(*tables, options()),
            self.draws(),
        )

    def _device(self, ctx: Context) -> tuple[BucketedCodec, Device] | None:
        """Return the kernels and where they run; None where array code has to do."""
        device = device_for(ctx)
        codec = None if device is None else self.cuda()
        return None if device is None or codec is None else (codec, device)

    def _encode_on_device(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> bool:
        """Encode with the kernels; False if there are none."""
        found = self._device(ctx)
        if found is None:
            return False
        from ringlet.compressors.kernels.cuda.common.bucketed import Target

        self._check(x.size, [payload], residual)
        codec, device = found
        arrays = [payload[name] for name in self.strides()]
        key = ctx.key() if codec.random else 0
        target = Target(x, x.size, arrays, residual, key, ctx.offset)
        codec.encode(device, [target], decay)
        return True

    def decode_on_device(
        self,
        payloads: Sequence[Payload],
        out: Array,
        ctx: Context,
        add: bool = False,
        scale: float = 1.0,
    ) -> bool:
        """Set ``out`` to scale * the sum of payloads, or add them, scaled; False without kernels.

        A scale other than 1 is for at most 96 payloads.
        """
        found = self._device(ctx)
        if found is None:
            return False
        from ringlet.compressors.kernels.cuda.common.bucketed import Output

        self._check(out.size, payloads)
        codec, device = found
        sources = [[payload[name] for name in self.strides()] for payload in payloads]
        codec.decode(device, [Output(out, sources)], add, scale)
        return True

    def _check(self, n: int, payloads: Sequence[Payload], residual: Array | None = None) -> None:
        """Raise CompressorError unless payloads, and a residual, are those of ``n`` elements."""
        if residual is not None and residual.size != n:
            check_lengths(self.label(), n, residual=residual)
        layout = self.layout(n)
        for payload in payloads:
            check_parts(self.label, layout, payload)

    def _encode(
        self,
        x: Array,
        residual: Array,
        decay: float,
        payload: Payload,
        ctx: Context,
        kernel: Kernel,
    ) -> None:
        granule, strides, n, x = self.granule, self.strides(), x.size, unlocked(x)
        key, weight = np.uint64(ctx.key() if self.draws() else 0), np.float32(decay)

        def encode(start: int, stop: int) -> None:
            if stop - start == n:
                arrays = list(map(payload.__getitem__, strides))
            else:
                arrays = _cut(payload, strides, start // granule, -(-stop // granule))
            kernel(x[start:stop], residual[start:stop], weight, key, ctx.offset + start, *arrays)

        run_ranges(x.size, granule, encode)

    def _decode(self, payloads: Sequence[Payload], out: Array, kernels: Sequence[Kernel]) -> None:
        self._check(out.size, payloads)
        granule, strides, n = self.granule, self.strides(), out.size
        piece = max(1, _CACHED // granule) * granule if len(payloads) > 1 else max(n, 1)

        def decode(start: int, stop: int) -> None:
            for a in range(start, stop, piece):
                b = min(a + piece, stop)
                for payload, kernel in zip(payloads, kernels, strict=True):
                    if b - a == n:
                        arrays = list(map(payload.__getitem__, strides))
                    else:
                        arrays = _cut(payload, strides, a // granule, -(-b // granule))
                    if kernel(*arrays, out[a:b]) is False:
                        raise PayloadError(f"{self.label()} received an index beyond its block")

        run_ranges(out.size, granule, decode)


def _cut(payload: Payload, strides: dict[str, int], first: int, last: int) -> list[Array]:
    """Return what of every array belongs to the buckets from ``first`` to ``last``."""
    return [
        payload[name][first * each : last * each] if each else payload[name]
        for name, each in strides.items()
    ]


class Packed(Bucketed):
    """Base: ``codes`` of ``bits`` bits, packed, and a bfloat16 scale for every bucket begun."""

    bits: int = option(8, ge=1, le=8, doc="bits of a code")
    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")

    def validate(self) -> None:
        """Buckets begin at whole bytes."""
        if self.bucket % 8:
            raise OptionError(f"{self.label()}: bucket must be a multiple of 8, got {self.bucket}")

    @property
    def granule(self) -> int:
        """The elements that share a scale."""
        return self.bucket

    def strides(self) -> dict[str, int]:
        """Bytes of codes, and a scale."""
        return {"codes": self.bucket * self.bits // 8, "scales": 1}

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed codes and scales."""
        return _packed(n, self.bits, self.bucket)

    def cuda_codec(
        self, name: str, random: bool = False, **constants: int | float
    ) -> BucketedCodec:
        """Return the CUDA kernels of the file ``name`` for these bits, bucket and constants.

        ``random`` tells whether they draw random numbers.
        """
        from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

        return BucketedCodec(name, self.bits, self.bucket, tuple(constants.items()), random=random)

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
        wide: Array = widened(scales).repeat(self.bucket)[:n]
        return wide


@functools.lru_cache(4096)  # of a model's sizes; each is asked for in every step
def _packed(n: int, bits: int, bucket: int) -> tuple[Part, ...]:
    codes = Part("codes", "uint8", packed_size(n, bits))
    return (codes, Part("scales", "bfloat16", -(-n // bucket)))


def widened(bits: Array) -> Array:
    """Return the float32 of bfloat16 bits."""
    wide: Array = (bits.astype("uint32") << 16).view("float32")
    return wide


def rounded_up(values: Array, xp: Any) -> Array:
    """Round non-negative float32 up to bfloat16 bits (uint16), at most to the largest finite."""
    bits = values.astype("float32").view("uint32").astype("uint64")
    rounded: Array = xp.minimum((bits + 0xFFFF) >> 16, 0x7F7F).astype("uint16")
    return rounded


def rounded(values: Array, xp: Any) -> Array:
    """Round non-negative float32 to bfloat16 bits (uint16), at most to the largest finite."""
    bits = values.view("uint32").astype("uint64")
    nearest: Array = xp.minimum((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F7F)
    return nearest.astype("uint16")


def lane_sums(rows: Array, xp: Any) -> Array:
    """Return each row's sum of float64, in the order of ``kernels.cpu.common.ordered_sums``."""
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
