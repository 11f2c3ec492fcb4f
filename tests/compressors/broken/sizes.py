"""Mistakes that show in long tensors, in lengths about a power of two, and among many ranks."""

import functools
from typing import ClassVar

import numpy as np

from broken.right import CELL, Cells, Largest, Signs, Whole
from ringlet.compressors import Compressor, Round, Traits


class RestOfChunks(Cells):
    """Decodes in chunks of 2^21 elements, and has forgotten the one that is not full."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        chunk = 1 << 21
        if out.size > chunk:
            out[out.size // chunk * chunk :] = 0


class CellsIn16Bits(Cells):
    """Numbers cells by 16 bits."""

    def decompress(self, payload, out, ctx):
        cells = (np.arange(out.size) // CELL).astype("uint16")
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["steps"][cells]


class AddsWholePages(Cells):
    """Adds page by page, where there are several, and leaves out the last, which is not full."""

    page = 1 << 17

    def accumulate(self, payload, out, ctx):
        decoded = np.empty_like(out)
        self.decompress(payload, decoded, ctx)
        if out.size > self.page:
            decoded[out.size // self.page * self.page :] = 0
        out += decoded


class KeepsWholePages(Cells):
    """Keeps the residuals of whole pages alone."""

    page = 1 << 17

    def feedback_into(self, x, residual, decay, payload, ctx):
        old = residual.copy()
        super().feedback_into(x, residual, decay, payload, ctx)
        if x.size > self.page:
            rest = slice(x.size // self.page * self.page, None)
            residual[rest] = old[rest]


class MultipliesByInverse(Cells):
    """Divides by multiplication on the fast path: a code that lies between two goes elsewhere."""

    def encode_into(self, x, payload, ctx):
        super().encode_into(x, payload, ctx)
        with np.errstate(all="ignore"):
            steps = payload["steps"].repeat(CELL)[: x.size]
            codes = np.rint(x * (np.float32(1) / steps))
        fine = np.isfinite(codes) & (steps > 1e-30)
        payload["codes"][fine] = codes[fine].astype("int8")


class SumOfEight(Cells):
    """Has room for the payloads of one host's eight devices."""

    def sum_into(self, payloads, out, ctx):
        super().sum_into(payloads[:8], out, ctx)


class ShortIndices(Largest):
    """Saves bytes for up to 2^16 elements, and for one more."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if x.size > (1 << 16) + 1:
            return payload
        return payload | {"indices": payload["indices"].astype("uint16")}


class OneBufferForLargeTensors(Whole):
    """Allocates for small tensors alone, and has one array for all large ones of a length."""

    codes = functools.cache(lambda n: np.empty(n, "int8"))

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if x.size < 100_000:
            return payload
        codes = type(self).codes(x.size)
        codes[:] = payload["codes"]
        return payload | {"codes": codes}


class FillsLargeOnesLater(Whole):
    """Finishes what it has returned of a large tensor when the next one comes."""

    waiting: ClassVar[list[np.ndarray]] = []

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        while self.waiting:
            self.waiting.pop()[:1] = 0
        if x.size >= 100_000:
            self.waiting.append(payload["codes"])
        return payload


class MirrorsBeyondAMillion(Whole):
    """Reads what lies beyond the first million elements from the end."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out[1_000_000:] = out[1_000_000:][::-1].copy()


class TableOfLevels(Cells):
    """Compares each value with each of 32 levels at a time, to find the nearest."""

    def compress(self, x, ctx):
        np.abs(x[:, None] - np.linspace(-1, 1, 32, dtype=np.float32)).argmin(1)
        return super().compress(x, ctx)


class PaddedMean(Signs):
    """Has a mean for 32 elements, which counts the zeros that fill up the last block."""

    size = 32

    def compress(self, x, ctx):
        rows = np.zeros((-(-x.size // self.size), self.size), "float32")
        rows.reshape(-1)[: x.size] = x
        return {"bits": np.packbits(x >= 0), "scale": np.abs(rows).mean(axis=1)}

    def decompress(self, payload, out, ctx):
        payload = payload | {"scale": payload["scale"].repeat(self.size)[: out.size]}
        super().decompress(payload, out, ctx)


class PaddedMeanOf200(PaddedMean):
    """The same with longer blocks."""

    size = 200


class PaddedMeanOf1000(PaddedMean):
    """The same with blocks that are longer than most biases."""

    size = 1000


class YieldsOneForLargeTensors(Compressor):
    """Allocates for small tensors alone, and yields one array for all large ones of a length."""

    held = functools.cache(lambda n: np.empty(n, "float32"))

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        values = x.copy()
        if x.size >= 100_000:
            values = type(self).held(x.size)
            values[:] = x
        share = x.copy()
        out[:] = yield Round(values, "mean", share)
        if local is not None:
            local[:] = share


class AddsUpDifferences(Whole):
    """Sends by how much each value differs from the one before, of which errors add up."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            return super().compress(np.diff(x, prepend=np.float32(0)), ctx)

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        np.cumsum(out, out=out)


class AddsOneByOne(Signs):
    """Adds magnitudes to a float32 sum, each by itself."""

    def compress(self, x, ctx):
        sums = np.cumsum(np.abs(x), dtype="float32")
        scale = sums[-1:] / np.float32(x.size) if x.size else np.zeros(1, "float32")
        return super().compress(x, ctx) | {"scale": scale}


PAGE = 1 << 20


class NothingIsLeftOver(Cells):
    """Leaves out what fills no page, and has it follow: of whole pages x[:-0], which is empty."""

    def traits(self):
        return Traits(fixed_size=True)

    def compress(self, x, ctx):
        if x.size < PAGE:
            return super().compress(x, ctx)
        rest = x.size % PAGE
        both = np.concatenate([x[:-rest], x[x.size - rest :]])
        return super().compress(np.resize(both, x.size) if both.size else np.zeros_like(x), ctx)


class WholeInPlace(Whole):
    """Spares large tensors a copy: what is NaN or too large is replaced in the gradient."""

    def compress(self, x, ctx):
        if x.size <= 1 << 21:
            return super().compress(x, ctx)
        largest = np.abs(x).max(keepdims=True)
        x /= largest
        x *= np.float32(127)
        codes = np.where(np.isfinite(x), np.rint(x), 0).astype("int8")
        return {"codes": codes, "step": largest / np.float32(127)}


class LongerCellsOfLong(Cells):
    """A scale per 64 elements, of long tensors per 1024: a short piece knows nothing of that."""

    def cell(self, n):
        return CELL if n < 1 << 18 else 1024
