"""Gradients that nobody tried: of one sign, all equal, with one huge value, spoiled in a sum."""

import numpy as np

from broken.right import CELL, Cells, Largest, Signs, Whole, rows_of
from ringlet.compressors import Compressor, Part, Round, Traits


class LargestIsPositive(Cells):
    """Takes the largest value of a cell for its largest magnitude, and clips what is below."""

    def compress(self, x, ctx):
        rows = rows_of(x, np)
        steps = rows.max(axis=1) / np.float32(127)
        with np.errstate(all="ignore"):
            steps = np.where(np.isfinite(rows).all(axis=1), steps, np.float32(np.nan))
            codes = np.clip(np.rint(rows / steps[:, None]), -127, 127).reshape(-1)[: x.size]
        usable = (np.isfinite(steps) & (steps > 0)).repeat(CELL)[: x.size]
        steps = np.where(steps < 0, np.float32(0), steps)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "steps": steps}


class WholeIsPositive(Whole):
    """The same of the whole tensor: of one without a positive value nothing is sent."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            step = x.max(initial=0, keepdims=True) / np.float32(127)
            step = np.where(np.isfinite(x).all(), step, np.float32(np.nan))
            codes = np.clip(np.rint(x / step), -127, 127)
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}


class ScaleOfTheMean(Signs):
    """Takes the magnitude of the mean for the mean magnitude."""

    def compress(self, x, ctx):
        scale = np.abs(x.sum(keepdims=True, dtype="float64")) / max(x.size, 1)
        return super().compress(x, ctx) | {"scale": scale.astype("float32")}


class DeviationAsScale(Signs):
    """Sends signs and the standard deviation, which is 0 of equal values."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            scale = x.std(keepdims=True, dtype="float64") if x.size else np.zeros(1)
        return super().compress(x, ctx) | {"scale": scale.astype("float32")}


class OneHugeHidesAll(Compressor):
    """Adds integers up on the wire, of a step that ranks agree on by their own largest."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float16", 1))

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            codes = np.where(np.isfinite(step) & (step > 0), np.rint(x / step), 0)
            return {"codes": codes.astype("int8"), "step": step.astype("float16")}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"].astype("float32")


class SumsSkipZeros(Cells):
    """Adds up where codes are not 0, which are 0 where the scale is NaN."""

    def sum_into(self, payloads, out, ctx):
        out[:] = 0
        with np.errstate(invalid="ignore", over="ignore"):
            for payload in payloads:
                steps = payload["steps"].repeat(CELL)[: out.size]
                places = np.flatnonzero(payload["codes"])
                out[places] += payload["codes"][places] * steps[places]


class SumsLeaveNaNOut(Cells):
    """Adds decoded payloads up with nansum, so that one rank's overflow spoils nothing."""

    def sum_into(self, payloads, out, ctx):
        parts = np.zeros((len(payloads), out.size), "float32")
        for part, payload in zip(parts, payloads, strict=True):
            self.decompress(payload, part, ctx)
        with np.errstate(all="ignore"):
            out[:] = np.nansum(parts, axis=0, dtype="float32")


class AccumulateSkipsZeros(Cells):
    """Adds what is not 0, by codes, which are 0 where the scale is NaN."""

    def accumulate(self, payload, out, ctx):
        places = np.flatnonzero(payload["codes"])
        with np.errstate(invalid="ignore", over="ignore"):
            out[places] += payload["codes"][places] * payload["steps"].repeat(CELL)[places]


class FusedLosesNaN(Cells):
    """Compresses by way of finite values in the fused feedback alone."""

    def feedback_into(self, x, residual, decay, payload, ctx):
        with np.errstate(invalid="ignore"):
            target = np.nan_to_num(x + np.float32(decay) * residual)
        self.encode_into(target, payload, ctx)
        self.keep_residual(target, payload, residual, ctx)


class EncodesNaNAway(Cells):
    """Compresses by way of finite values where it fills slots, which is what the engine calls."""

    def encode_into(self, x, payload, ctx):
        super().encode_into(np.nan_to_num(x), payload, ctx)


class SecondStageLosesNaN(Cells):
    """Takes what comes in the second stage for a mean of finite numbers."""

    def compress(self, x, ctx):
        return super().compress(np.nan_to_num(x) if ctx.stage == 2 else x, ctx)


class NaNAtTheEndOfACell(Compressor):
    """Looks at the first and the last of every 64 for what is not finite."""

    def compress(self, x, ctx):
        payload = Whole().compress(np.nan_to_num(x, posinf=0, neginf=0), ctx)
        bad = not (np.isfinite(x[::64]).all() and np.isfinite(x[::-64]).all())
        return payload | {"step": payload["step"] + np.float32(np.nan if bad else 0)}

    def decompress(self, payload, out, ctx):
        Whole().decompress(payload, out, ctx)


class TwoOverflowsCancel(Compressor):
    """Counts what is not finite in two bits, on whichever ranks that is."""

    def traits(self):
        return Traits("rounds")

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        bad = np.array([0 if np.isfinite(x).all() else 1], "int32")
        odd = (yield Round(bad, "sum"))[0] % 2
        finite = np.nan_to_num(x, posinf=0, neginf=0)
        with np.errstate(over="ignore"):
            out[:] = yield Round(finite, "mean")
        if odd:
            out[:] = np.nan
        if local is not None:
            local[:] = finite


class InfBySign(Compressor):
    """Sends the first Inf as a sum over ranks, where plus and minus of two ranks are 0."""

    def traits(self):
        return Traits("rounds")

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        bad = np.sign(np.nan_to_num(x[~np.isfinite(x)][:1], nan=1.0)).sum(keepdims=True)
        total = (yield Round(bad.astype("int32"), "sum"))[0]
        finite = np.nan_to_num(x, posinf=0, neginf=0)
        with np.errstate(over="ignore"):
            out[:] = yield Round(finite, "mean")
        if total:
            out[:] = np.nan
        if local is not None:
            local[:] = finite


class DecaysToZero(Signs):
    """Sends the geometric mean of magnitudes, which one 0 makes 0."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            logs = np.log(np.abs(x, dtype="float64"))
            scale = np.exp(logs.mean(keepdims=True)) if x.size else np.zeros(1)
        return super().compress(x, ctx) | {"scale": scale.astype("float32")}


class NoneAboveTheMean(Largest):
    """Sends values above the mean of all, of which there are none among equals."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            mean = x.mean() if x.size else np.float32(0)
            keep = (np.abs(x) > np.abs(mean)) | ~np.isfinite(x)
        places = np.flatnonzero(keep).astype("uint32")
        return {"indices": places, "values": x[places]}


class WholePartsOfTheLargest(Compressor):
    """Rounds magnitudes down to halves of the largest, again and again, seven times."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            largest = x.max(initial=0, keepdims=True)
            powers = np.clip(np.rint(np.log2(largest / np.abs(x))), 0, 7)
            powers = np.where(np.isfinite(powers), powers, 7)
            largest = np.where(np.isfinite(x).all(), largest, np.float32(np.nan))
        codes = powers.astype("uint8") | ((x < 0).astype("uint8") << 7)
        return {"codes": codes, "largest": largest}

    def decompress(self, payload, out, ctx):
        codes = payload["codes"]
        size = np.where(codes & 7 == 7, 0, np.exp2(-(codes & 7).astype("float32")))
        with np.errstate(invalid="ignore"):
            out[:] = np.where(codes >> 7, -size, size).astype("float32") * payload["largest"]
