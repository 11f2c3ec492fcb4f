"""What does not survive the wire, a large tensor, or the arrays that the layout promises."""

import numpy as np

from broken.right import CELL, Cells, Largest, Masked, Signs, Whole
from ringlet.compressors import Compressor, Part, Traits


class NarrowIndices(Largest):
    """16-bit indices: entries beyond 65535 land elsewhere."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"indices": payload["indices"].astype("uint16")}


class NarrowGaps(Largest):
    """16-bit gaps between indices: a stretch of more than 65535 without an entry wraps."""

    def compress(self, x, ctx):
        places = ctx.xp.sort(super().compress(x, ctx)["indices"]).astype("int64")
        gaps = ctx.xp.diff(places, prepend=0)
        return {"gaps": gaps.astype("uint16"), "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[ctx.xp.cumsum(payload["gaps"], dtype="int64")] = payload["values"]


class NarrowSums(Largest):
    """The gaps fit, but the decoder adds them up in their own 16 bits."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        places = ctx.xp.sort(payload["indices"]).astype("int64")
        filled = [ctx.xp.arange(0, x.size, 60000), places]  # a stop every 60000, so that gaps fit
        places = ctx.xp.unique(ctx.xp.concatenate(filled))
        return {"gaps": ctx.xp.diff(places, prepend=0).astype("uint16"), "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[ctx.xp.add.accumulate(payload["gaps"], dtype="uint16")] = payload["values"]


class FloatIndices(Largest):
    """Indices ride among the values as float32, which holds integers up to 2**24."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        places = payload["indices"].astype("float32")
        return {"pairs": ctx.xp.concatenate([places, payload["values"]])}

    def decompress(self, payload, out, ctx):
        pairs = payload["pairs"]
        k = pairs.size // 2
        super().decompress(
            {"indices": pairs[:k].astype("int64") % max(out.size, 1), "values": pairs[k:]}, out, ctx
        )


class NarrowCount(Signs):
    """Sends how many elements there are as int16 and decodes as many."""

    def compress(self, x, ctx):
        return super().compress(x, ctx) | {"count": ctx.xp.array([x.size]).astype("uint16")}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        super().decompress(payload, out[: int(payload["count"][0])], ctx)


class BigEndian(Whole):
    """Sends the scale in network byte order; the wire carries bytes and no byte order."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"step": payload["step"].astype(">f4")}


class DoubleScale(Cells):
    """The scale comes out of NumPy as float64, the layout says float32."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"steps": payload["steps"].astype("float64")}


class PlainNumber(Whole):
    """Returns the scale as a Python number."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"step": float(payload["step"][0])}


class NoDimension(Whole):
    """Returns the scale as an array without a dimension, which x.max() is."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"step": payload["step"].reshape(())}


class Matrix(Compressor):
    """Returns rows and columns."""

    def compress(self, x, ctx):
        return {"values": x.astype("float16").reshape(1, -1)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"].reshape(-1)


class Complex(Compressor):
    """Sends a Fourier transform as complex numbers."""

    def compress(self, x, ctx):
        return {"spectrum": np.fft.rfft(np.append(x, [0, 0])).astype("complex64")}

    def decompress(self, payload, out, ctx):
        out[:] = np.fft.irfft(payload["spectrum"], out.size + 2)[: out.size]


class Tuple(Whole):
    """Returns a tuple in place of a dict."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload["codes"], payload["step"]

    def decompress(self, payload, out, ctx):
        codes, step = payload
        super().decompress({"codes": codes, "step": step}, out, ctx)


class LayoutTooSmall(Cells):
    """The layout forgets the last, partial cell."""

    def layout(self, n):
        return (Part("codes", "int8", n), Part("steps", "float32", n // CELL))


class LayoutOtherName(Cells):
    """The layout says 'scales', the payload says 'steps'."""

    def layout(self, n):
        return (Part("codes", "int8", n), Part("scales", "float32", -(-n // CELL)))


class SizeByContent(Largest):
    """Declares a fixed size and leaves zeros out."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        k = min(n, max(1, n // 16))
        return (Part("indices", "uint32", k), Part("values", "float32", k))

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        kept = payload["values"] != 0
        return {name: array[kept] for name, array in payload.items()}


class UsesNumel(Cells):
    """Sizes arrays by the whole tensor, though a piece may come."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        steps = ctx.xp.zeros(-(-ctx.numel // CELL), "float32")
        steps[: payload["steps"].size] = payload["steps"]
        return payload | {"steps": steps}


class ChangesPayload(Whole):
    """Decodes in place, into the payload that others are going to decode."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return {"values": payload["codes"].astype("float32"), "step": payload["step"]}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            payload["values"] *= payload["step"]
        out[:] = payload["values"]


class WrongChainedPart(Whole):
    """Names an array for others to compress that it does not send."""

    def chained_part(self):
        return "coefficients"


class WrongChainedCount(Masked):
    """Counts all elements, not those that the mask lets through."""

    def chained_count(self, payload, n):
        return n


class BlocksWithoutCount(Compressor):
    """Sends eight values for every index, and does not say that they are more."""

    def compress(self, x, ctx):
        rows = np.zeros((-(-x.size // 8), 8), "float32")
        rows.reshape(-1)[: x.size] = x
        size = np.abs(rows).max(axis=1, initial=0)
        size = np.where(np.isnan(size), np.float32(np.inf), size)
        blocks = np.argsort(-size, kind="stable")[: -(-len(rows) // 8)].astype("uint32")
        return {"indices": blocks, "values": rows[blocks].reshape(-1)}

    def decompress(self, payload, out, ctx):
        rows = np.zeros((-(-out.size // 8), 8), "float32")
        rows[payload["indices"]] = payload["values"].reshape(-1, 8)
        out[:] = rows.reshape(-1)[: out.size]


class CountsValuesThatAreGone(Masked):
    """Counts values by the array of values itself, which another one has compressed."""

    def chained_part(self):
        return "values"

    def chained_count(self, payload, n):
        return payload["values"].size


class SizeAmongValues(Largest):
    """Sends the tensor's size as the first of its values, which '| int8' takes for the largest."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        values = np.append(np.float32(x.size), payload["values"])
        return {"indices": np.append(np.uint32(0), payload["indices"]), "values": values}

    def decompress(self, payload, out, ctx):
        super().decompress({name: array[1:] for name, array in payload.items()}, out, ctx)


class MasksValues(Whole):
    """Returns an array with a mask, which does not travel."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"codes": np.ma.masked_equal(payload["codes"], -127)}


class LayoutOfShares(Largest):
    """Has a tenth of the elements as a number that need not be whole."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("indices", "uint32", 0.1 * n), Part("values", "float32", 0.1 * n))


class CallsThemPlaces(Largest):
    """Has a name of its own for indices, by which nobody counts the values."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return {"places": payload["indices"], "values": payload["values"]}

    def decompress(self, payload, out, ctx):
        super().decompress({"indices": payload["places"], "values": payload["values"]}, out, ctx)


class CountsToTheNearest(Compressor):
    """A sixteenth at places that all draw alike: rounded down, and counted to the nearest."""

    def chained_part(self):
        return "values"

    def chained_count(self, payload, n):
        return max(min(n, 1), round(n / 16))

    def places(self, n, ctx):
        return ctx.rng(shared=True).permutation(n)[: max(min(n, 1), n // 16)]

    def compress(self, x, ctx):
        with np.errstate(invalid="ignore"):
            spoiled = (0 * x).sum()
        return {"values": x[self.places(x.size, ctx)] + spoiled}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[self.places(out.size, ctx)] = payload["values"]
