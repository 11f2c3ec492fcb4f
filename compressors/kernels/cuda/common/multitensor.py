"""Multi-tensor execution (see ``ringlet.compressors.core.multitensor``) with the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_entries
from ringlet.compressors.core.multitensor import Decoding, Encoding, MultiTensor, Spaced, Sum
from ringlet.compressors.core.traits import Payload
from ringlet.compressors.dense.casts import BF16, FP16
from ringlet.compressors.kernels.cuda.common import scatter
from ringlet.compressors.kernels.cuda.common.bucketed import Codec, Output, Target
from ringlet.compressors.kernels.cuda.common.scatter import Entries, Sparse
from ringlet.compressors.kernels.cuda.dense import lossless
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Sought, reaching
from ringlet.compressors.kernels.cuda.sparsifiers.topk import Selected, largest

Seek = Callable[[Array, Array | None, Context], Sought | None]
_APART = 64  # scratch arrays begin at multiples of so many elements, for loads of 16 bytes
_HALVES = {"float16": FP16().cuda(), "uint16": BF16().cuda()}


class Buckets:
    """Kernels of a codec that works bucket by bucket; ``names`` are its payload's arrays."""

    def __init__(self, codec: Codec, device: Device, names: Iterable[str]) -> None:
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
            tensors = _summed(self, tensors, spaced, scale, weight)
            spaced, scale = None, 1.0
        random = self._codec.random
        targets = [
            Target(
                t.x, t.n, self._arrays(t.payload), t.residual, t.ctx.key() if random else 0,
                t.ctx.offset,
                () if t.source is None else (self._arrays(t.source),),
            )
            for t in tensors
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
            _rounded(self._device, [t.out for t in tensors], tensors[0].ctx, scale, run)

    def _arrays(self, payload: Payload) -> list[Array]:
        return [payload[name] for name in self._names]


class Selections:
    """Kernels of ``topk``: payloads of indices (uint32) and values (float32), as many as wanted."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def encode(
        self,
        tensors: Sequence[Encoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        decay: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Select by a sampled threshold, then by radix; the host learns nothing in between."""
        _unweighted(weight)
        if spaced is not None:
            tensors, scale = _summed(self, tensors, spaced, scale, weight), 1.0
        wanted = [
            Selected(t.x, t.payload["indices"], t.payload["values"], t.residual)
            for t in tensors
            if t.x is not None
        ]
        largest(self._device, wanted, tensors[0].ctx.workspace.array, decay, scale)

    def decode(
        self,
        tensors: Sequence[Decoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Clear outputs, and add the entries of one payload after the other."""
        _unweighted(weight)
        count, stride = spaced or (1, 0)
        address = self._device.address

        def run(outs: Sequence[Array], factor: float) -> None:
            sums = []
            for out, t in zip(outs, tensors, strict=True):
                indices, values = t.source["indices"], t.source["values"]
                places = address(indices), address(values)
                steps = range(0, count * stride, stride) if stride else (0,)
                entries = [Entries(places[0] + by, places[1] + by, values.size) for by in steps]
                sums.append(Sparse(out, entries))
            scatter.sums(self._device, sums, factor)

        _rounded(self._device, [t.out for t in tensors], tensors[0].ctx, scale, run)


class Reaching:
    """Kernels that select what reaches a threshold, which ``seek`` tells; the host waits once.

    ``seek(x, residual, ctx)`` returns None where the largest entries are wanted, ``count(n)`` many.
    """

    feeds: ClassVar[bool] = True

    def __init__(self, device: Device, seek: Seek, count: Callable[[int], int]) -> None:
        self._device, self._seek, self._count = device, seek, count

    def compress(
        self, tensors: Sequence[Encoding], scale: float = 1.0, decay: float = 1.0
    ) -> list[Payload]:
        """Select by thresholds, and exactly where there is none."""
        ctx = tensors[0].ctx
        scratch, empty = ctx.workspace.array, ctx.xp.empty
        payloads: list[Payload] = [{} for _ in tensors]
        sought: dict[int, Sought] = {}
        exact: list[Selected] = []
        for i, t in enumerate(tensors):
            assert t.x is not None, "sums of selections are not compressed again"
            found = self._seek(t.x, t.residual, t.ctx)
            if found is not None:
                sought[i] = found
                continue
            k = self._count(t.n)
            indices, values = empty(k, "uint32"), empty(k, "float32")
            payloads[i] = {"indices": indices, "values": values}
            exact.append(Selected(t.x, indices, values, t.residual))
        if exact:
            largest(self._device, exact, scratch, decay, scale)
        made = reaching(self._device, list(sought.values()), scratch, empty, decay, scale)
        for i, (indices, values) in zip(sought, made, strict=True):
            payloads[i] = {"indices": indices, "values": values}
        return payloads

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Clear outputs, and add the entries of one payload after the other."""
        address = self._device.address

        def entries(payload: Payload) -> Entries:
            indices, values = check_entries("a sum of entries", payload)
            return Entries(address(indices), address(values), values.size)

        def run(outs: Sequence[Array], factor: float) -> None:
            sparse = [
                Sparse(out, [entries(payload) for payload in t.payloads])
                for out, t in zip(outs, sums, strict=True)
            ]  # fmt: skip
            scatter.sums(self._device, sparse, factor)

        _rounded(self._device, [t.out for t in sums], sums[0].ctx, scale, run)


class Exponents:
    """Kernels of ``lossless``: exponents in few bits; ``check(payload, n)`` raises PayloadError."""

    feeds: ClassVar[bool] = False

    def __init__(self, device: Device, exact: bool, check: Callable[[Payload, int], None]) -> None:
        self._device, self._exact, self._check = device, exact, check

    def compress(
        self, tensors: Sequence[Encoding], scale: float = 1.0, decay: float = 1.0
    ) -> list[Payload]:
        """Encode in four launches for up to 32 tensors, scaled before where ``scale`` is not 1."""
        ctx = tensors[0].ctx
        xs = [t.x for t in tensors if t.x is not None]
        if scale != 1.0:
            xs = self._scaled(xs, scale, ctx)
        return lossless.encode(self._device, xs, self._exact, ctx.workspace.array, ctx.xp.empty)

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Decode the first payloads, and add the others, in three launches for up to 32 tensors."""
        workspace = sums[0].ctx.workspace

        def run(outs: Sequence[Array], factor: float) -> None:
            for number in range(len(sums[0].payloads)):
                coded = []
                for out, t in zip(outs, sums, strict=True):
                    self._check(t.payloads[number], out.size)
                    coded.append(lossless.Coded(out, t.payloads[number]))
                lossless.decode(self._device, coded, self._exact, number > 0, workspace.array)
            if factor != 1.0:
                scatter.multiply(self._device, outs, factor)

        _rounded(self._device, [t.out for t in sums], sums[0].ctx, scale, run)

    def _scaled(self, xs: Sequence[Array], scale: float, ctx: Context) -> list[Array]:
        """Return scale * x as float32, in scratch memory."""
        wide, half = _scratch("scaled", [x.size for x in xs], ctx), _HALVES.get(xs[0].dtype.name)
        if half is None:
            for x, copy in zip(xs, wide, strict=True):
                copy[...] = x
            scatter.multiply(self._device, wide, scale)
        else:
            outputs = [Output(out, ((x,),)) for x, out in zip(xs, wide, strict=True)]
            half.decode(self._device, outputs, scale=scale)
        return wide


def _unweighted(weight: float) -> None:
    if weight != 1.0:
        raise ValueError("entries that are selected are decoded as they are")


def _summed(
    kernels: MultiTensor,
    tensors: Sequence[Encoding],
    spaced: Spaced,
    scale: float,
    weight: float,
) -> list[Encoding]:
    """Decode the sums to scratch memory; return them as what is to be encoded."""
    totals = _scratch("summed", [t.n for t in tensors], tensors[0].ctx)
    pairs = list(zip(tensors, totals, strict=True))
    sums = [Decoding(total, t.source or {}, t.ctx) for t, total in pairs]
    kernels.decode(sums, spaced, scale, weight)
    return [t._replace(x=total, source=None) for t, total in pairs]


def _scratch(name: str, sizes: Sequence[int], ctx: Context) -> list[Array]:
    """Return an uninitialised float32 array of each size; valid until the next of this name."""
    starts = [0]
    for n in sizes:
        starts.append(starts[-1] + -(-n // _APART) * _APART)
    room = ctx.workspace.array(name, starts[-1])
    return [room[start : start + n] for start, n in zip(starts, sizes, strict=False)]


def _rounded(
    device: Device,
    outs: Sequence[Array],
    ctx: Context,
    scale: float,
    run: Callable[[Sequence[Array], float], None],
) -> None:
    """Let ``run(outs, scale)`` decode to float32, and cast outputs of 16 bits then."""
    half = _HALVES.get(outs[0].dtype.name)
    if half is None:
        run(outs, scale)
        return
    wide = _scratch("decoded", [out.size for out in outs], ctx)
    run(wide, scale)
    half.encode(device, [Target(w, w.size, (out,)) for out, w in zip(outs, wide, strict=True)])
