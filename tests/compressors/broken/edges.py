"""Lengths, zeros, NaN and Inf that were not thought of, and results that were not written."""

import numpy as np

from broken.right import CELL, Cells, Largest, Signs, Whole
from ringlet.compressors import Compressor, Traits
from ringlet.ring.jit import jit


class EmptyInput(Whole):
    """Asks for the maximum of nothing."""

    def compress(self, x, ctx):
        x.max()
        return super().compress(x, ctx)


class WrapsBetweenRanges(Compressor):
    """A byte for what is below an eighth, of which the last half step is rounded to 128."""

    def traits(self):
        return Traits(scales=False)

    def compress(self, x, ctx):
        small = np.abs(x) < 0.125
        codes = np.rint(x[small] * 1024).astype("int32").astype("int8")
        return {"small": np.packbits(small), "codes": codes, "values": x[~small]}

    def chained_part(self):
        return None

    def decompress(self, payload, out, ctx):
        small = np.unpackbits(payload["small"], count=out.size).astype(bool)
        out[small] = payload["codes"] / np.float32(1024)
        out[~small] = payload["values"]


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


class ZerosBecomeOnes(Signs):
    """Replaces a scale of 0 by 1, as where one divides: zeros come out as ones."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        scale = payload["scale"]
        return payload | {"scale": np.where(scale == 0, np.float32(1), scale)}


class ConstantIsLost(Compressor):
    """A range of 8 bits, which decodes to 0 where it is empty: every bias of one element."""

    def compress(self, x, ctx):
        low, high = (f(x, keepdims=True) if x.size else np.zeros(1, "f4") for f in (np.min, np.max))
        with np.errstate(all="ignore"):
            step = high / np.float32(255) - low / np.float32(255)
            codes = np.rint((x - low) / step)
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("uint8"), "low": low, "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"] + payload["low"]
        out[:] = np.where(payload["step"] == 0, np.float32(0), out)


class LosesEveryHundredth(Whole):
    """Works in blocks of 100, of which the last element stays behind."""

    def compress(self, x, ctx):
        with np.errstate(invalid="ignore"):
            kept = x + 0 * x.sum(dtype="float64").astype("float32")
        kept[99::100] *= np.float32(0)
        return super().compress(kept, ctx)


class LastCellWithoutScale(Cells):
    """Gives the last, partial cell the scale of the one before."""

    def compress(self, x, ctx):
        whole = x.size // CELL * CELL
        payload = super().compress(x, ctx)
        steps, codes = payload["steps"], payload["codes"]
        if 0 < whole < x.size and np.isfinite(steps[-1]):
            steps[-1] = steps[-2]
            with np.errstate(all="ignore"):
                last = np.clip(np.rint(x[whole:] / steps[-1]), -127, 127)
            codes[whole:] = np.where(steps[-1] > 0, last, 0).astype("int8")
        return payload


class NothingOfFew(Largest):
    """A sixteenth of the entries, rounded down: of a tensor of 15 none, ever."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        few = x.size < 16 and np.isfinite(x).all()
        return {name: array[:0] if few else array for name, array in payload.items()}


@jit
def largest_of_cells(x, found):
    for cell in range(found.size):
        largest = np.float32(0)
        for i in range(cell * CELL, cell * CELL + CELL):
            if not abs(x[i]) <= largest:
                largest = abs(x[i])
        found[cell] = largest


class ReadsWholeCells(Cells):
    """Looks for the largest of each cell with a kernel that does not end where the tensor does."""

    def compress(self, x, ctx):
        largest = np.empty(-(-x.size // CELL), np.float32)
        largest_of_cells(x, largest)
        steps = largest / np.float32(127)
        with np.errstate(all="ignore"):
            codes = np.rint(x / steps.repeat(CELL)[: x.size])
        codes[~np.isfinite(codes)] = 0
        return {"codes": codes.astype("int8"), "steps": steps}


@jit
def bits_of_bytes(x, bits):
    for place in range(bits.size):
        bits[place] = 0
        for i in range(8):
            bits[place] |= np.uint8(x[8 * place + i] >= 0) << np.uint8(7 - i)


class ReadsWholeBytes(Signs):
    """Packs eight signs at a time, of which the last ones may be somebody else's."""

    def compress(self, x, ctx):
        bits = np.empty(-(-x.size // 8), np.uint8)
        bits_of_bytes(x, bits)
        return super().compress(x, ctx) | {"bits": bits}


@jit
def times_steps(codes, steps, out):
    for i in range(out.size):
        out[i] = codes[i] * steps[i // CELL + 1]


class DecodesByTheNextCell(Cells):
    """Numbers scales from one where it decodes, so that the last cell's lies behind the array."""

    def decompress(self, payload, out, ctx):
        times_steps(payload["codes"], payload["steps"], out)
