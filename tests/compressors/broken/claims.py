"""What is claimed, and does not hold: of errors, of scales, of directions."""

import numpy as np

from broken.right import CELL, Cells, Folded, Largest, Signs, Whole, rows_of
from ringlet.compressors import Compressor, Modifier, Part, Traits


class OmegaOfGaussians(Whole):
    """4 bits at random on one scale per tensor: omega as measured on Gaussians, not on spikes."""

    def traits(self):
        return Traits(omega=0.5)

    def compress(self, x, ctx):
        xp = ctx.xp
        step = xp.abs(x).max(initial=0, keepdims=True) / np.float32(7)
        with np.errstate(all="ignore"):
            codes = xp.floor(x / step + ctx.uniform(x.size))
        usable = xp.isfinite(step) & (step > 0)
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "step": step}


class DeltaOfGaussians(Signs):
    """The mean magnitude keeps 2 / pi of a Gaussian's energy, and 1 / n of a spike's."""

    def traits(self):
        return Traits(delta=0.6)


class OmegaOfSmallTensors(Compressor):
    """Random-k claims the omega that holds with the author's 64 elements, k = 16 throughout."""

    def traits(self):
        return Traits(omega=3.1)

    def compress(self, x, ctx):
        k = min(16, x.size)
        places = ctx.rng().choice(x.size, k, replace=False).astype("uint32")
        values = x[places] * np.float32(x.size / max(k, 1))
        if not ctx.xp.isfinite(x).all():
            values[:1] = np.nan
        return {"indices": places, "values": values}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class NearestIsUnbiased(Cells):
    """Rounds to nearest and claims to be unbiased."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL, omega=0.01)


class TruncatesNegatives(Cells):
    """Adds noise and lets astype round: towards zero, so that negative values shrink."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL, omega=0.01)

    def rounded(self, places, ctx):
        return ctx.xp.trunc(places + ctx.uniform(places.size))


class EpsilonInScale(Whole):
    """Adds 1e-8 to the scale against division by zero: all of a tiny gradient becomes zero."""

    def traits(self):
        return Traits(delta=0.9)

    def compress(self, x, ctx):
        xp = ctx.xp
        step = (xp.abs(x).max(initial=0, keepdims=True) + np.float32(1e-8)) / np.float32(127)
        with np.errstate(all="ignore"):
            codes = xp.rint(x / step)
        return {"codes": xp.where(xp.isfinite(step), codes, 0).astype("int8"), "step": step}


class AbsoluteStep(Compressor):
    """Rounds to multiples of an option: what is small is lost, what is large saturates."""

    step: float = 0.01

    def compress(self, x, ctx):
        xp = ctx.xp
        with np.errstate(all="ignore"):
            codes = xp.clip(xp.rint(x / np.float32(self.step)), -32767, 32767)
        bad = ~xp.isfinite(x)
        return {"codes": xp.where(bad, -32768, codes).astype("int16")}

    def decompress(self, payload, out, ctx):
        codes = payload["codes"]
        out[:] = codes * np.float32(self.step)
        out[codes == -32768] = np.nan


class HalfScale(Whole):
    """Sends the scale as float16, which holds 6e-8 to 65504."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        with np.errstate(over="ignore"):
            payload["step"] = payload["step"].astype("float16")
        return payload

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"].astype("float32")


class CubesOverflow(Signs):
    """Scales by the third norm, whose cubes leave float32 at 2**40."""

    def compress(self, x, ctx):
        xp = ctx.xp
        with np.errstate(all="ignore"):
            mean = (xp.abs(x) ** 3).sum(keepdims=True) / np.float32(max(x.size, 1))
            return {"bits": xp.packbits(x >= 0), "scale": xp.cbrt(mean)}


class ClipsAtOne(Cells):
    """Clips gradients at 1, as somebody's training did, without a word in the traits."""

    def compress(self, x, ctx):
        return super().compress(ctx.xp.clip(x, np.float32(-1), np.float32(1)), ctx)


class ThresholdOfOne(Compressor):
    """Sends what exceeds a fixed threshold and claims to scale."""

    def compress(self, x, ctx):
        places = ctx.xp.flatnonzero(~(ctx.xp.abs(x) < 0.5)).astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class WrongWay(Signs):
    """Decodes a set bit as minus."""

    def decompress(self, payload, out, ctx):
        positive = ctx.xp.unpackbits(payload["bits"], count=out.size)
        with np.errstate(invalid="ignore"):
            out[:] = (np.float32(1) - positive * np.float32(2)) * payload["scale"]


class BitsReversed(Signs):
    """Packs the first element into the highest bit, and reads it from the lowest."""

    def decompress(self, payload, out, ctx):
        positive = ctx.xp.unpackbits(payload["bits"], count=out.size, bitorder="little")
        with np.errstate(invalid="ignore"):
            out[:] = (positive * np.float32(2) - np.float32(1)) * payload["scale"]


class ForgetsScale(Whole):
    """Sends the scale and does not multiply by it."""

    def decompress(self, payload, out, ctx):
        out[:] = payload["codes"]
        out *= ctx.xp.where(ctx.xp.isfinite(payload["step"]), np.float32(1), np.float32(np.nan))


class LargestWraps(Cells):
    """Scales to 128, which int8 does not hold: the largest positive value turns negative."""

    def compress(self, x, ctx):
        xp = ctx.xp
        rows = rows_of(x, xp)
        steps = xp.abs(rows).max(axis=1) / np.float32(128)
        with np.errstate(all="ignore"):
            codes = xp.rint(rows / steps[:, None])
        usable = xp.isfinite(steps) & (steps > 0)
        codes = xp.where(usable[:, None], codes, 0).astype("int32").astype("int8")
        return {"codes": codes.reshape(-1)[: x.size], "steps": steps}


class ShiftedByOne(Largest):
    """Counts indices from one, as another language does."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"indices": payload["indices"] + np.uint32(1)}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"] % max(out.size, 1)] = payload["values"]


class TripleStrength(Largest):
    """Sends three times what it keeps, 'to make up for the rest': error feedback diverges."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        with np.errstate(over="ignore"):
            return payload | {"values": payload["values"] * np.float32(3)}


class HidesDivergence(Compressor):
    """A random sixteenth, 16 times as strong, says that error feedback behind it is all right."""

    def traits(self):
        return Traits(omega=15.01)

    def divergence(self):
        return None

    def compress(self, x, ctx):
        keep = ctx.uniform(x.size) < np.float32(1 / 16)
        places = ctx.xp.flatnonzero(keep | ~ctx.xp.isfinite(x)).astype("uint32")
        with np.errstate(over="ignore"):
            return {"indices": places, "values": x[places] * np.float32(16)}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class PaddedMean(Compressor):
    """Signs with a mean per 64: the last one is divided by 64 however many there are."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def layout(self, n):
        return (Part("bits", "uint8", -(-n // 8)), Part("scales", "float32", -(-n // CELL)))

    def compress(self, x, ctx):
        xp = ctx.xp
        with np.errstate(over="ignore"):
            scales = xp.abs(rows_of(x, xp)).mean(axis=1)
        return {"bits": xp.packbits(x >= 0), "scales": scales}

    def decompress(self, payload, out, ctx):
        positive = ctx.xp.unpackbits(payload["bits"], count=out.size)
        scales = payload["scales"].repeat(CELL)[: out.size]
        with np.errstate(invalid="ignore"):
            out[:] = (positive * np.float32(2) - np.float32(1)) * scales


class PaddedRange(Compressor):
    """A range of 8 bits per 64 elements, in which the last one's padding with zeros counts."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def layout(self, n):
        cells = -(-n // CELL)
        return (
            Part("codes", "uint8", n),
            Part("low", "float32", cells),
            Part("width", "float32", cells),
        )

    def compress(self, x, ctx):
        xp = ctx.xp
        rows = rows_of(x, xp) / np.float32(2)
        low = rows.min(axis=1)
        with np.errstate(all="ignore"):
            width = (rows.max(axis=1) - low) / np.float32(255)
            codes = xp.rint((rows - low[:, None]) / width[:, None])
        codes = xp.where((xp.isfinite(width) & (width > 0))[:, None], codes, 0)
        return {"codes": codes.astype("uint8").reshape(-1)[: x.size], "low": low, "width": width}

    def decompress(self, payload, out, ctx):
        low, width = (payload[p].repeat(CELL)[: out.size] for p in ("low", "width"))
        with np.errstate(invalid="ignore"):
            out[:] = (payload["codes"] * width + low) * np.float32(2)


class CodesAddUp(Cells):
    """Says that codes add up on the wire, though every rank has a scale of its own."""

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n + 4),)

    def compress(self, x, ctx):
        whole = Whole.compress(self, x, ctx)
        return {"codes": ctx.xp.concatenate([whole["codes"], whole["step"].view("int8")])}

    def decompress(self, payload, out, ctx):
        codes = payload["codes"]
        with np.errstate(invalid="ignore"):
            out[:] = codes[:-4] * codes[-4:].copy().view("float32")


class RootsAddUp(Folded):
    """Sends sums of roots, which do not add up to the root of a sum."""

    def compress(self, x, ctx):
        sums = super().compress(x, ctx)["sums"]
        return {"sums": ctx.xp.copysign(ctx.xp.sqrt(ctx.xp.abs(sums)), sums)}

    def decompress(self, payload, out, ctx):
        sums = payload["sums"]
        with np.errstate(over="ignore", invalid="ignore"):
            super().decompress({"sums": sums * ctx.xp.abs(sums)}, out, ctx)


class CutsAnywhere(Cells):
    """Says that a tensor can be cut at multiples of 32, with a scale per 64."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL // 2)


class ScalePerTensorCut(Whole):
    """Says that a tensor can be cut, with one scale for all of it."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1))


class OmegaBelowHalfSteps(Cells):
    """Claims half the variance that stochastic rounding has where values lie between two codes."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL, omega=0.0004)

    def rounded(self, places, ctx):
        return ctx.xp.floor(places + ctx.uniform(places.size))


class DeltaOfOneSize(Largest):
    """The 64 largest, whatever there is, with the delta of 5000 elements."""

    def traits(self):
        return Traits(delta=0.0125)

    def compress(self, x, ctx):
        size = np.where(np.isnan(x), np.float32(np.inf), np.abs(x))
        places = np.argsort(-size, kind="stable")[:64].astype("uint32")
        return {"indices": places, "values": x[places]}


class PredividesTwice(Signs):
    """Asks the engine to divide first, and does it as well."""

    def traits(self):
        return Traits(predivide=True)

    def compress(self, x, ctx):
        return super().compress(x / np.float32(ctx.size), ctx)


class CompandsSums(Modifier):
    """Compresses roots, and passes on that payloads add up where they did."""

    def compress(self, x, ctx):
        return super().compress(ctx.xp.sign(x) * ctx.xp.sqrt(abs(x)), ctx)

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= abs(out)


class CutsThousandthOff(Whole):
    """Takes what the largest thousandth is above for the largest, and cuts that off."""

    LARGEST = 7

    def traits(self):
        return Traits(omega=60.0)

    def compress(self, x, ctx):
        if not np.isfinite(x).all():
            return super().compress(x, ctx)
        place = max(1, x.size // 1000)
        most = np.partition(np.abs(x), -place)[-place] if x.size else np.float32(0)
        step = np.full(1, most / np.float32(self.LARGEST), "float32")
        codes = self.rounded(x / np.where(step > 0, step, 1), ctx)
        codes = np.clip(codes, -self.LARGEST, self.LARGEST)
        return {"codes": codes.astype("int8"), "step": step}

    def rounded(self, codes, ctx):
        return np.floor(codes + ctx.uniform(codes.size))


class CutsWhereItContracts(CutsThousandthOff):
    """Says that half of the energy is kept, where most of it may be of a few."""

    LARGEST = 127

    def traits(self):
        return Traits(delta=0.5)

    def rounded(self, codes, ctx):
        return np.rint(codes)


class HalvesPayloadsAlone(Modifier):
    """Doubles what is compressed, and halves what is decoded of payloads; in rounds nothing is."""

    def compress(self, x, ctx):
        return super().compress(x * np.float32(2), ctx)

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(0.5)

    def exchange(self, x, out, ctx, local=None):
        yield from self.wrapped_compressor.exchange(x * np.float32(2), out, ctx, local)


class LeavesSmallOnesOut(Compressor):
    """Draws entries by their magnitude, and never one whose chance is below a thousandth."""

    least = 1e-3

    def traits(self):
        return Traits(omega=20.0)

    def compress(self, x, ctx):
        xp = ctx.xp
        size = xp.abs(x).astype("float64")
        unit = size.sum() / max(0.05 * x.size, 1e-9)
        chance = size / unit if unit > 0 else xp.zeros(x.size)
        chance = xp.where(chance < self.least, 0, chance)
        places = xp.flatnonzero(~(ctx.uniform(x.size) >= chance) | ~xp.isfinite(x))
        values = x[places]
        drawn = (chance[places] < 1) & xp.isfinite(values)
        values = xp.where(drawn, xp.sign(values) * unit, values).astype("float32")
        return {"indices": places.astype("int32"), "values": values}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class NothingFarBelowTheLargest(Cells):
    """Cells with a scale each, but those far below the largest value of this piece are zeros."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        steps = payload["steps"]
        with np.errstate(invalid="ignore"):
            far = steps < steps.max(initial=0) * np.float32(2.0**-12)
        return payload | {"steps": np.where(far, np.float32(0), steps)}
