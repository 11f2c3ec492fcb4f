"""Compressors written as docs/own-compressor.md says: array code, for CPU and GPU.

cd examples && ringlet check "written_compressors:DeltaTopK | ef"
"""

from dataclasses import replace

from ringlet.compressors import Compressor, Part, Round, Traits, option


class LogQuantiser(Compressor):
    """Round to powers of two times the largest entry, at random and without bias, in a byte.

    Natural compression (Horvath et al., MSML 2022), relative to the largest entry.
    """

    def traits(self):
        # Between 2**k and 2**(k+1) the variance is at most an eighth of the square.
        return Traits(fixed_size=True, omega=0.125 + 1e-6)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("largest", "float32", 1))

    def compress(self, x, ctx):
        xp = ctx.xp
        largest = xp.abs(x).max(keepdims=True) if x.size else xp.zeros(1, "float32")
        usable = xp.isfinite(largest) & (largest > 0)
        size = xp.where(usable, xp.abs(x) / xp.where(usable, largest, 1), 0)
        noise = ctx.uniform(x.size)
        fraction, power = xp.frexp(size)  # fraction in [1/2, 1): between 2**(power-1) and 2**power
        power = power - 1 + (noise < 2 * fraction - 1)
        # Codes 1 to 127 are the powers 0 to -126; what is smaller is the last of them, or zero.
        small = noise < xp.ldexp(size, 126)
        codes = xp.where(size < 2.0**-126, xp.where(small, 127, 0), 1 - power)
        codes = xp.where(x < 0, -codes, codes)
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "largest": largest}

    def decompress(self, payload, out, ctx):
        xp, codes = ctx.xp, payload["codes"].astype("int32")
        size = xp.ldexp(payload["largest"], xp.minimum(1 - xp.abs(codes), 0))
        out[:] = xp.sign(codes).astype("float32") * size  # 0 * NaN is NaN


class CountSketch(Compressor):
    """Add sketches up over the ranks, see who is largest, and exchange those entries exactly.

    Two rounds (Ivkin et al., "Communication-efficient distributed SGD with sketching", NeurIPS
    2019): the sum of sketches is the sketch of the sum, so all ranks find the same entries.
    """

    ratio: float = option(0.02, gt=0, le=1, doc="share of the entries that are exchanged")
    rows: int = option(3, ge=1, doc="hashes of an entry, whose median is its estimate")
    width: float = option(0.1, gt=0, le=1, doc="cells of a row, as a share of the entries")

    def traits(self):
        return Traits("rounds", in_place=True)

    def cells(self, n):
        return max(1, int(self.width * n))

    def hashes(self, n, ctx):
        rng = ctx.rng(shared=True)  # called once: it begins anew with every call
        places = rng.integers(0, self.cells(n), (self.rows, n))
        return places, (rng.integers(0, 2, (self.rows, n)) * 2 - 1).astype("float32")

    def sketch(self, x, places, signs, ctx):
        xp, cells = ctx.xp, self.cells(x.size)
        rows = [xp.bincount(p, s * x, cells) for p, s in zip(places, signs, strict=True)]
        return xp.concatenate(rows).astype("float32")

    def estimate(self, sketch, places, signs, ctx):
        rows = sketch.reshape(self.rows, -1)
        found = [row[p] * s for row, p, s in zip(rows, places, signs, strict=True)]
        return ctx.xp.median(ctx.xp.stack(found), axis=0)

    def largest(self, x, ctx):
        size = ctx.xp.where(ctx.xp.isnan(x), ctx.xp.inf, ctx.xp.abs(x))
        return ctx.xp.argsort(-size)[: max(1, int(self.ratio * x.size))]

    def exchange(self, x, out, ctx, local=None):
        places, signs = self.hashes(x.size, ctx)
        sketch = yield Round(self.sketch(x, places, signs, ctx), "mean")
        visible = (0 * sketch).sum()  # NaN where anybody's overflowed
        chosen = self.largest(self.estimate(sketch, places, signs, ctx), ctx)
        sent = x[chosen]
        # What is chained behind leaves in the third argument what became of the first.
        mean = (yield Round(sent, "mean", sent)) + visible
        out[:] = 0
        out[chosen] = mean
        if local is not None:
            local[:] = 0
            local[chosen] = sent


class SketchFeedback(CountSketch):
    """Send sketches alone, and keep in their sum what is not taken out of it.

    FetchSGD (Rothchild et al., "FetchSGD: communication-efficient federated learning with
    sketching", ICML 2020): the payload is linear and the end is not, so error feedback belongs
    where payloads add up. The memory is a sketch, the same one on all ranks.
    """

    def traits(self):
        return Traits("rounds", stateful=True, gradient_units=("kept",), in_place=True)

    def units_size(self, name, n):
        return self.rows * self.cells(n)

    def regrouped(self, state):
        return {}  # beside a rank that joins without the sketch all begin anew, or results differ

    def exchange(self, x, out, ctx, local=None):
        xp = ctx.xp
        # Hashes that stay: sketches of two steps add up only if they hash alike.
        places, signs = self.hashes(x.size, replace(ctx, step=0))
        own = self.sketch(x, places, signs, ctx)
        kept = ctx.state.get("kept")
        if kept is None or kept.size != own.size:
            kept = ctx.state["kept"] = xp.zeros(own.size, "float32")
        sketch = kept + (yield Round(own, "mean"))
        chosen = self.largest(self.estimate(sketch, places, signs, ctx), ctx)
        for row in places:  # of entries that share a cell the largest: more would be taken twice
            chosen = chosen[xp.sort(xp.unique(row[chosen], return_index=True)[1])]
        rows = sketch.reshape(self.rows, -1)
        cells = xp.stack([row[p[chosen]] for row, p in zip(rows, places, strict=True)])
        out[:] = 0
        out[chosen] = (signs[:, chosen] * cells).mean(axis=0)  # what leaves least in the sketch
        left = sketch - self.sketch(out, places, signs, ctx)
        finite = xp.isfinite(left).all()
        xp.copyto(kept, left, where=finite)
        out += xp.where(finite, xp.float32(0), xp.float32("nan"))  # overflows stay visible
        if local is not None:
            local[:] = out


class DeltaTopK(Compressor):
    """Send the largest entries, and between their places the distances, in 16 bits."""

    ratio: float = option(0.01, gt=0, le=1, doc="share of the entries that travel")

    def compress(self, x, ctx):
        xp = ctx.xp
        k = min(x.size, max(1, int(self.ratio * x.size)))
        size = xp.where(xp.isnan(x), xp.inf, xp.abs(x))
        chosen = xp.argsort(-size)[:k]
        # A stop every 65535 entries, which sends its value too, keeps distances in 16 bits.
        places = xp.unique(xp.concatenate([chosen, xp.arange(0, x.size, 65535)]))
        return {"distances": xp.diff(places, prepend=0).astype("uint16"), "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[ctx.xp.cumsum(payload["distances"], dtype="int64")] = payload["values"]

    def chained_count(self, payload, n):
        return payload["distances"].size
