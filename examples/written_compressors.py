"""Three compressors as docs/compressors.md, "Writing one", says: array code, for CPU and GPU alike.

cd examples && ringlet check "written_compressors:DeltaTopK | ef"
"""

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

    def exchange(self, x, out, ctx, local=None):
        xp, n = ctx.xp, x.size
        cells = max(1, int(self.width * n))
        rng = ctx.rng(shared=True)  # called once: it begins anew with every call
        places = rng.integers(0, cells, (self.rows, n))
        signs = (rng.integers(0, 2, (self.rows, n)) * 2 - 1).astype("float32")
        own = [xp.bincount(p, s * x, cells) for p, s in zip(places, signs, strict=True)]
        sketch = yield Round(xp.concatenate(own).astype("float32"), "mean")
        visible = (0 * sketch).sum()  # NaN where anybody's overflowed
        rows = sketch.reshape(self.rows, cells)
        found = [row[p] * s for row, p, s in zip(rows, places, signs, strict=True)]
        size = xp.abs(xp.median(xp.stack(found), axis=0))
        chosen = xp.argsort(-xp.where(xp.isnan(size), xp.inf, size))[: max(1, int(self.ratio * n))]
        sent = x[chosen]
        mean = (yield Round(sent, "mean")) + visible
        out[:] = 0
        out[chosen] = mean
        if local is not None:
            local[:] = 0
            local[chosen] = sent


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
