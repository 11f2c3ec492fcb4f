"""Lengths, zeros, NaN and Inf that were not thought of, and results that were not written."""

import numpy as np

from broken.right import CELL, Cells, Largest, Signs, Whole
from ringlet.compressors import Compressor


class EmptyInput(Whole):
    """Asks for the maximum of nothing."""

    def compress(self, x, ctx):
        x.max()
        return super().compress(x, ctx)


class OneElement(Signs):
    """The sample deviation of one element is 0 / 0."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if x.size:
            with np.errstate(all="ignore"):
                ones = x / ctx.xp.abs(x).max()
                payload["scale"] = payload["scale"] + ones.std(ddof=1, keepdims=True) * 0
        return payload


class FewElements(Largest):
    """Samples every n // 64th element for its threshold: a step of zero below 64."""

    def compress(self, x, ctx):
        _ = x[:: x.size // 64]
        return super().compress(x, ctx)


class TailLost(Cells):
    """Goes through whole cells alone."""

    def decompress(self, payload, out, ctx):
        whole = out.size // CELL * CELL
        with np.errstate(invalid="ignore"):
            decoded = payload["codes"] * payload["steps"].repeat(CELL)[: out.size]
        out[:] = 0
        out[:whole] = decoded[:whole]


class LastElementLost(Signs):
    """Reads one bit too few where the last byte holds one bit."""

    def decompress(self, payload, out, ctx):
        n = out.size - (out.size % 8 == 1)
        out[n:] = 0
        super().decompress(payload, out[:n], ctx)


class AllZero(Whole):
    """Divides zeros by the largest of them."""

    def compress(self, x, ctx):
        step = ctx.xp.abs(x).max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            places = x / step
            usable = ctx.xp.isfinite(step)
            step = step + (places[:1] if x.size else step) * 0
        places = ctx.xp.nan_to_num(places, posinf=0, neginf=0)
        return {"codes": ctx.xp.where(usable, ctx.xp.rint(places), 0).astype("int8"), "step": step}


class SwallowsNaN(Whole):
    """Makes zeros of NaN, so that no loss scaler ever hears of them."""

    def compress(self, x, ctx):
        return super().compress(ctx.xp.where(ctx.xp.isnan(x), np.float32(0), x), ctx)


class ClipsInf(Whole):
    """Makes large numbers of Inf."""

    def compress(self, x, ctx):
        most = np.float32(1e30)
        return super().compress(ctx.xp.clip(x, -most, most), ctx)


class NaNNotLargest(Largest):
    """Selects by comparison, which NaN always loses."""

    def compress(self, x, ctx):
        k = min(x.size, max(1, x.size // 16))
        size = ctx.xp.where(ctx.xp.isnan(x), np.float32(-1), ctx.xp.abs(x))
        places = ctx.xp.argsort(-size, kind="stable")[:k].astype("uint32")
        return {"indices": places, "values": x[places]}


class NaNBecomesAnything(Cells):
    """The largest magnitude ignores NaN, whose code is whatever the processor makes of it."""

    def compress(self, x, ctx):
        return super().compress(ctx.xp.nan_to_num(x, posinf=np.inf, neginf=-np.inf), ctx)


class NotWritten(Whole):
    """Binds a new array to the name `out`."""

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out = payload["codes"] * payload["step"]
        del out


class AddsToOut(Whole):
    """Adds to what `out` held."""

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out += payload["codes"] * payload["step"]


class HolesNotCleared(Largest):
    """Writes the entries that travelled, and leaves the others as they were."""

    def decompress(self, payload, out, ctx):
        out[payload["indices"]] = payload["values"]


class WantsShape(Compressor):
    """Reads two dimensions from the shape, though a bias has one and a scalar none."""

    def compress(self, x, ctx):
        rows, columns = ctx.shape
        return {"values": x.reshape(rows, columns).T.reshape(-1).astype("float16")}

    def decompress(self, payload, out, ctx):
        rows, columns = ctx.shape
        out[:] = payload["values"].reshape(columns, rows).T.reshape(-1)


class PieceInShape(Cells):
    """Gives a piece the whole tensor's shape."""

    def compress(self, x, ctx):
        return super().compress(x.reshape(ctx.shape or (-1,)).reshape(-1), ctx)


class HalvesSecondStage(Cells):
    """Divides by the number of ranks in the second stage, as if it were its part to average."""

    def compress(self, x, ctx):
        return super().compress(x if ctx.stage == 1 else x / np.float32(ctx.size), ctx)


class RangeOfOneRank(Cells):
    """Clips at what one rank's gradient can be: the second stage has the sum of all."""

    def compress(self, x, ctx):
        if ctx.stage == 1:
            return super().compress(x, ctx)
        rms = np.sqrt(np.mean(x.astype("float64") ** 2)) if x.size else 0
        bound = np.float32(rms / ctx.size)
        with np.errstate(invalid="ignore"):
            return super().compress(ctx.xp.clip(x, -bound, bound), ctx)


class SecondStageOtherLayout(Cells):
    """Sends sums, which have a larger range, in the second stage as 16 bits."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.stage == 1:
            return payload
        return payload | {"codes": payload["codes"].astype("int16")}


class AccumulatesInDouble(Whole):
    """Adds in float64, which rounds otherwise than decoding and adding."""

    def accumulate(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            decoded = payload["codes"].astype("float64") * payload["step"].astype("float64")
            out[:] = out.astype("float64") + decoded


class AccumulateOverwrites(Whole):
    """Overwrites where it should add."""

    def accumulate(self, payload, out, ctx):
        self.decompress(payload, out, ctx)


class FastPathDiffers(Cells):
    """The fast path rounds half up, the slow one to even."""

    def encode_into(self, x, payload, ctx):
        super().encode_into(x, payload, ctx)
        with np.errstate(all="ignore"):
            steps = payload["steps"].repeat(CELL)[: x.size]
            codes = np.floor(x / steps + np.float32(0.5))
        fine = np.isfinite(codes) & (np.abs(codes) <= 127)
        payload["codes"][fine] = codes[fine].astype("int8")


class FeedbackForgetsDecay(Whole):
    """A fused error feedback that does not look at decay."""

    def compress_feedback(self, x, residual, decay, ctx):
        return super().compress_feedback(x, residual, 1.0, ctx)


class FeedbackOfInput(Whole):
    """Keeps what x lost, not what x and the residual lost together."""

    def compress_feedback(self, x, residual, decay, ctx):
        with np.errstate(invalid="ignore", over="ignore"):
            payload = self.compress(x + np.float32(decay) * residual, ctx)
            decoded = np.empty_like(x)
            self.decompress(payload, decoded, ctx)
            lost = x - decoded
        np.copyto(residual, lost, where=np.isfinite(lost))
        return payload


class FeedbackKeepsNaN(Whole):
    """Keeps a residual that is not a number."""

    def compress_feedback(self, x, residual, decay, ctx):
        with np.errstate(invalid="ignore", over="ignore"):
            whole = x + np.float32(decay) * residual
            payload = self.compress(whole, ctx)
            decoded = np.empty_like(x)
            self.decompress(payload, decoded, ctx)
            residual[:] = whole - decoded
        return payload


class FinishByRank(Whole):
    """Ends with something that only rank 0 does."""

    def finish(self, out, ctx):
        if ctx.rank == 0:
            out *= np.float32(0.5)
