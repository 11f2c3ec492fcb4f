"""Mistakes that show in long tensors, in lengths about a power of two, and among many ranks."""

import numpy as np

from broken.right import CELL, Cells, Largest


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
