"""The base of compressors whose kernels know the bucket and one parameter, for a tensor or many."""

from __future__ import annotations

from typing import Any

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import Kernel, Packed
from ringlet.compressors.base.contract import keeps
from ringlet.compressors.core.context import Array, Context


class PackedCodec(Packed):
    """Base: subclasses name the kernels ``encoding`` and ``decoding``, and the CUDA ones.

    Kernels for many tensors a call are made of these.
    """

    @property
    def parameter(self) -> float:
        """What the encoding kernel is told besides the bucket."""
        return 0.0

    def encoding(self, feedback: bool) -> Kernel:
        """Return the kernel ``encode(x, residual, decay, bucket, parameter, key, start, codes,
        scales)``, otherwise as ``encoder`` has it.

        ``x`` and ``residual`` are n float32, the latter unused without ``feedback``; ``codes``
        uint8, ``bits`` for each of n elements; ``scales`` uint16, the bits of a bfloat16 for each
        of ceil(n / bucket) buckets. The same kernel each time. Raises TypeError where a subclass
        names none.
        """
        raise TypeError(f"{type(self).__name__} has no encoding kernel")

    def decoding(self) -> Kernel:
        """Return the kernel ``decode(codes, scales, bucket, add, out)``.

        It adds to ``out`` (n float32), or overwrites it; the others are as in ``encoding``. The
        same kernel each time. Raises TypeError where a subclass names none.
        """
        raise TypeError(f"{type(self).__name__} has no decoding kernel")

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel, for this bucket and parameter."""
        kernel, bucket, parameter = self.encoding(feedback), self.bucket, self.parameter

        def encode(
            x: Array, held: Array, decay: Any, key: Any, start: int, codes: Array, scales: Array
        ) -> None:
            kernel(x, held, decay, bucket, parameter, key, start, codes, scales)

        return encode

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel, for this bucket."""
        kernel, bucket = self.decoding(), self.bucket
        return lambda codes, scales, out: kernel(codes, scales, bucket, add, out)

    def batched(self) -> Batched | None:
        """The same kernels, for many tensors a call."""
        own = keeps(self, PackedCodec, "encoder", "decoder", "measure")
        if not (own and self.relies_on_kernels()):
            return None
        from ringlet.compressors.kernels.cpu.common.batched import packed_decoder, packed_encoder

        options, decoder = (self.bits, self.bucket, self.parameter), packed_decoder(self.decoding())
        return self.looped(lambda fed: packed_encoder(self.encoding(fed)), decoder, lambda: options)
