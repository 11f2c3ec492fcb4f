"""Plugins without a fault: what the broken ones are made from, and where the kit must keep quiet.

Array code throughout, as an author writes who follows "Writing one".
"""

import numpy as np

from ringlet.compressors import Compressor, Part, Round, Traits

CELL = 64


class Whole(Compressor):
    """8 bits on one scale for the tensor."""

    def compress(self, x, ctx):
        xp = ctx.xp
        largest = xp.abs(x).max(initial=0, keepdims=True)
        step = largest / np.float32(127)
        with np.errstate(all="ignore"):
            codes = xp.rint(x / step)
        usable = xp.isfinite(step) & (step > 0)
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


def rows_of(x, xp, fill=0.0):
    """Return ``x`` as rows of a cell each, the last one filled up."""
    rows = xp.full((-(-x.size // CELL), CELL), np.float32(fill))
    rows.reshape(-1)[: x.size] = x
    return rows


class Cells(Compressor):
    """8 bits, a scale per 64 elements."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("steps", "float32", -(-n // CELL)))

    def rounded(self, places, ctx):
        return ctx.xp.rint(places)

    def compress(self, x, ctx):
        xp = ctx.xp
        rows = rows_of(x, xp)
        steps = xp.abs(rows).max(axis=1) / np.float32(127)
        with np.errstate(all="ignore"):
            codes = self.rounded((rows / steps[:, None]).reshape(-1)[: x.size], ctx)
        usable = (xp.isfinite(steps) & (steps > 0)).repeat(CELL)[: x.size]
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "steps": steps}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["steps"].repeat(CELL)[: out.size]


class Largest(Compressor):
    """A sixteenth of the entries, those of largest magnitude, with 32-bit indices."""

    def compress(self, x, ctx):
        xp = ctx.xp
        k = min(x.size, max(1, x.size // 16))
        size = xp.where(xp.isnan(x), np.float32(np.inf), xp.abs(x))
        places = xp.argsort(-size, kind="stable")[:k].astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class Masked(Compressor):
    """Sends values at places that a bit mask tells; whoever chains behind it is told why not."""

    def compress(self, x, ctx):
        keep = ~(ctx.xp.abs(x) < ctx.xp.abs(x).mean(dtype="float32") if x.size else x < 0)
        return {"mask": ctx.xp.packbits(keep), "values": x[keep]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        keep = ctx.xp.unpackbits(payload["mask"], count=out.size).astype(bool)
        out[keep] = payload["values"]


class Signs(Compressor):
    """A bit per element and the mean magnitude."""

    def compress(self, x, ctx):
        xp = ctx.xp
        scale = xp.abs(x).sum(keepdims=True, dtype="float64") / max(x.size, 1)
        return {"bits": xp.packbits(x >= 0), "scale": scale.astype("float32")}

    def decompress(self, payload, out, ctx):
        positive = ctx.xp.unpackbits(payload["bits"], count=out.size)
        with np.errstate(invalid="ignore"):
            out[:] = (positive * np.float32(2) - np.float32(1)) * payload["scale"]


class Folded(Compressor):
    """A linear sketch: every element goes to one of n / 4 sums, the same one on all ranks."""

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("sums", "float32", self.count(n)),)

    def count(self, n):
        return -(-n // 4)

    def places(self, n, ctx):
        rng = ctx.rng(shared=True)
        signs = rng.integers(0, 2, n) * np.float32(2) - np.float32(1)
        return rng.integers(0, max(self.count(n), 1), n), signs.astype("float32")

    def compress(self, x, ctx):
        places, signs = self.places(x.size, ctx)
        sums = ctx.xp.zeros(self.count(x.size), "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            np.add.at(sums, places, signs * x)
        return {"sums": sums}

    def decompress(self, payload, out, ctx):
        places, signs = self.places(out.size, ctx)
        with np.errstate(invalid="ignore"):
            out[:] = payload["sums"][places] * signs * np.float32(0.25)


class Momentum(Compressor):
    """Sends an average over steps, which it remembers, as 16-bit floats times a power of two."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("average",))

    def compress(self, x, ctx):
        xp = ctx.xp
        average = ctx.state.get("average")
        if average is None or average.size != x.size:
            average = ctx.state["average"] = xp.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            new = average + (x - average) * np.float32(0.5)
        xp.copyto(average, new, where=xp.isfinite(new))
        return {"values": new}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class SharedScale(Compressor):
    """Two rounds: the largest magnitude of all ranks, then the sum of integers on that scale."""

    def traits(self):
        return Traits("rounds", in_place=True)

    def exchange(self, x, out, ctx, local=None):
        xp = ctx.xp
        largest = xp.abs(x).max(initial=0, keepdims=True)
        largest = xp.where(xp.isnan(largest), np.float32(np.inf), largest)
        largest = (yield Round(largest, "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(1000)
            usable = xp.isfinite(step) & (step > 0)
            codes = xp.where(usable, xp.rint(x / step), 0).astype("int32")
            total = yield Round(codes, "sum")
            step = xp.where(xp.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))
