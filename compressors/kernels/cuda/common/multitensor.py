"""Multi-tensor execution (see ``ringlet.compressors.core.multitensor``) with the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ringlet.compressors.core.context import Array, Context, KeysByStep
from ringlet.compressors.core.multitensor import Decoding, Encoding, MultiTensor, Spaced
from ringlet.compressors.core.traits import Payload
from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec, Output, Target
from ringlet.compressors.kernels.cuda.runtime.device import Device

_APART = 64  # scratch arrays begin at multiples of so many elements, for loads of 16 bytes
# Casts, by the dtype of arrays: bfloat16 is kept as uint16.
HALVES = {
    dtype: BucketedCodec("dense/casts", 16, 1024, (("HALF", half),))
    for dtype, half in (("float16", 1), ("uint16", 0))
}


class Buckets:
    """Kernels of a codec that works bucket by bucket; ``names`` are its payload's arrays."""

    def __init__(self, codec: BucketedCodec, device: Device, names: Iterable[str]) -> None:
        self._codec, self._device, self._names = codec, device, tuple(names)

    def encode(
        self,
        tensors: Sequence[Encoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        decay: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Encode, with residuals, in one pass; sums in the same one where the codec is fused."""
        if spaced is not None and not self._codec.fused:
            tensors = summed(self, tensors, spaced, scale, weight)
            spaced, scale = None, 1.0
        keys = [0] * len(tensors)
        if self._codec.random:
            contexts = [t.ctx for t in tensors]
            keys = KeysByStep(contexts).at([ctx.step for ctx in contexts]).tolist()
        targets = [
            Target(
                t.x, t.n, self._arrays(t.payload), t.residual, key, t.ctx.offset,
                () if t.source is None else (self._arrays(t.source),),
            )
            for t, key in zip(tensors, keys, strict=True)
        ]  # fmt: skip
        self._codec.encode(self._device, targets, decay, scale, None, weight, spaced)

    def decode(
        self,
        tensors: Sequence[Decoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Decode and sum in one pass, and round to 16 bits there if the codec can."""

        def run(outs: Sequence[Array], factor: float) -> None:
            outputs = [
                Output(out, (self._arrays(t.source),)) for out, t in zip(outs, tensors, strict=True)
            ]
            self._codec.decode(self._device, outputs, False, factor, weight, spaced)

        if self._codec.fused:
            run([t.out for t in tensors], scale)
        else:
            rounded(self._device, [t.out for t in tensors], tensors[0].ctx, scale, run)

    def _arrays(self, payload: Payload) -> list[Array]:
        return [payload[name] for name in self._names]


def summed(
    kernels: MultiTensor,
    tensors: Sequence[Encoding],
    spaced: Spaced,
    scale: float,
    weight: float,
) -> list[Encoding]:
    """Decode the sums to scratch memory; return them as what is to be encoded."""
    totals = scratch_arrays("summed", [t.n for t in tensors], tensors[0].ctx)
    pairs = list(zip(tensors, totals, strict=True))
    sums = [Decoding(total, t.source or {}, t.ctx) for t, total in pairs]
    kernels.decode(sums, spaced, scale, weight)
    return [t._replace(x=total, source=None) for t, total in pairs]


def scratch_arrays(name: str, sizes: Sequence[int], ctx: Context) -> list[Array]:
    """Return an uninitialised float32 array of each size; valid until the next of this name."""
    starts = [0]
    for n in sizes:
        starts.append(starts[-1] + -(-n // _APART) * _APART)
    room = ctx.workspace.array(name, starts[-1])
    return [room[start : start + n] for start, n in zip(starts, sizes, strict=False)]


def rounded(
    device: Device,
    outs: Sequence[Array],
    ctx: Context,
    scale: float,
    run: Callable[[Sequence[Array], float], None],
) -> None:
    """Let ``run(outs, scale)`` decode to float32, and cast outputs of 16 bits then."""
    half = HALVES.get(outs[0].dtype.name)
    if half is None:
        run(outs, scale)
        return
    wide = scratch_arrays("decoded", [out.size for out in outs], ctx)
    run(wide, scale)
    half.encode(device, [Target(w, w.size, (out,)) for out, w in zip(outs, wide, strict=True)])
