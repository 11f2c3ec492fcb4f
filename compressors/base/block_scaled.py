"""The base of compressors that send packed codes, and a byte of scale for every block begun."""

from __future__ import annotations

from functools import lru_cache

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import Bucketed, Kernel
from ringlet.compressors.base.contract import Part, keeps
from ringlet.compressors.core.context import Context
from ringlet.compressors.core.packing import packed_size


class BlockScaled(Bucketed):
    """Base: subclasses name ``width``, ``granule``, the kernels, and the CUDA ones.

    Kernels for many tensors a call are made of these.
    """

    @property
    def width(self) -> int:
        """Bits of a code."""
        raise TypeError(f"{type(self).__name__} does not say how many bits a code has")

    def encoding(self, feedback: bool) -> Kernel:
        """Return the kernel ``encode(x, residual, decay, key, start, codes, scales)``.

        As ``encoder`` has it: ``x`` and ``residual`` are n float32, the latter unused without
        ``feedback``; ``codes`` uint8, ``width`` bits for each of n elements; ``scales`` uint8, one
        for each of ceil(n / granule) blocks. The same kernel each time. Raises TypeError where a
        subclass names none.
        """
        raise TypeError(f"{type(self).__name__} has no encoding kernel")

    def decoding(self, add: bool) -> Kernel:
        """Return the kernel ``decode(codes, scales, out)``.

        It adds to ``out`` (n float32), or overwrites it; the others are as in ``encoding``. The
        same kernel each time. Raises TypeError where a subclass names none.
        """
        raise TypeError(f"{type(self).__name__} has no decoding kernel")

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed codes, and a byte for every block begun."""
        return _layout(n, self.width, self.granule)

    def strides(self) -> dict[str, int]:
        """Bytes of codes, and a scale."""
        return {"codes": self.granule * self.width // 8, "scales": 1}

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel."""
        return self.encoding(feedback)

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel."""
        return self.decoding(add)

    def batched(self) -> Batched | None:
        """The same kernels, for many tensors a call."""
        own = keeps(self, BlockScaled, "encoder", "decoder", "measure", "layout", "strides")
        if not (own and self.relies_on_kernels()):
            return None
        from ringlet.compressors.kernels.cpu.common.batched import scaled_decoder, scaled_encoder

        options = self.width, self.granule
        decoder = scaled_decoder(self.decoding(False), self.decoding(True))
        return self.looped(lambda fed: scaled_encoder(self.encoding(fed)), decoder, lambda: options)


@lru_cache(4096)  # of a model's sizes; each is asked for in every step
def _layout(n: int, width: int, block: int) -> tuple[Part, ...]:
    return (Part("codes", "uint8", packed_size(n, width)), Part("scales", "uint8", -(-n // block)))
