"""Values that an author has not thought of: of one sign, all equal, one of them huge."""

import numpy as np

from broken.right import CELL, Cells, Largest, SharedScale, Signs, rows_of
from ringlet.compressors import Compressor, Round


class MaximumWithoutAbs(Compressor):
    """Takes its step from the largest value, which need not be positive, and clips."""

    def compress(self, x, ctx):
        xp = ctx.xp
        step = x.max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            codes = xp.clip(xp.rint(x / step), -127, 127)
        usable = xp.isfinite(step) & (step > 0)
        spoiled = np.float32(0) * x.sum(dtype="float64").astype("float32")
        return {"codes": xp.where(usable, codes, 0).astype("int8"), "step": step + spoiled}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class MaximumOfCells(Cells):
    """The same in every cell of 64."""

    def compress(self, x, ctx):
        rows = rows_of(x, np)
        steps = rows.max(axis=1) / np.float32(127)
        with np.errstate(all="ignore"):
            steps = steps + np.float32(0) * rows.sum(axis=1)
            codes = np.clip(np.rint(rows / steps[:, None]), -127, 127).reshape(-1)[: x.size]
        usable = (np.isfinite(steps) & (steps > 0)).repeat(CELL)[: x.size]
        return {"codes": np.where(usable, codes, 0).astype("int8"), "steps": steps}


class MeanOfPositives(Compressor):
    """Sends a bit per element, and the mean of what is positive for both signs."""

    def compress(self, x, ctx):
        positive = x[x > 0]
        scale = positive.mean(dtype="float64") if positive.size else 0.0
        scale = scale + 0 * x.sum(dtype="float64")
        return {"bits": np.packbits(x >= 0), "scale": np.array([scale], "float32")}

    def decompress(self, payload, out, ctx):
        positive = np.unpackbits(payload["bits"], count=out.size)
        with np.errstate(invalid="ignore"):
            out[:] = (positive * np.float32(2) - np.float32(1)) * payload["scale"]


class SignedMean(Signs):
    """Takes the magnitude of the mean for the mean magnitude: values of both signs cancel."""

    def compress(self, x, ctx):
        scale = np.abs(x.sum(keepdims=True, dtype="float64")) / max(x.size, 1)
        return {"bits": np.packbits(x >= 0), "scale": scale.astype("float32")}


class MaximumInRounds(SharedScale):
    """Agrees on the largest value of all ranks, without its magnitude."""

    def exchange(self, x, out, ctx, local=None):
        largest = x.max(initial=0, keepdims=True)
        spoiled = not np.isfinite(x).all()
        largest = (yield Round(np.where(spoiled, np.float32(np.inf), largest), "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(1000)
            usable = np.isfinite(step) & (step > 0)
            codes = np.where(usable, np.clip(np.rint(x / step), -3000, 3000), 0).astype("int32")
            total = yield Round(codes, "sum")
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class RangeFromZero(Compressor):
    """Codes from 0 to the largest value: what is negative becomes 0."""

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(255)
        with np.errstate(all="ignore"):
            codes = np.where((step > 0) & np.isfinite(step), np.rint(x / step), 0)
        return {"codes": np.clip(codes, 0, 255).astype("uint8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class RangeOfMinMax(Compressor):
    """8 bits between the least and the largest; where they are the same, nothing."""

    def compress(self, x, ctx):
        low, high = x.min(initial=np.inf), x.max(initial=-np.inf)
        if not x.size:
            low = high = np.float32(0)
        with np.errstate(all="ignore"):
            step = (high - low) / np.float32(255)
            codes = np.rint((x - low) / step) if step > 0 else np.zeros_like(x)
        codes = np.where(np.isfinite(codes), codes, 0).astype("uint8")
        return {"codes": codes, "ends": np.array([low if step != 0 else 0, step], "float32")}

    def decompress(self, payload, out, ctx):
        low, step = payload["ends"]
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * step + low


class RangeWithoutZero(Compressor):
    """8 bits between the least and the largest; of one value, it sends its magnitude."""

    def compress(self, x, ctx):
        low = x.min() if x.size else np.float32(0)
        high = x.max() if x.size else np.float32(0)
        with np.errstate(all="ignore"):
            step = (high - low) / np.float32(255)
            codes = np.rint((x - low) / step) if step > 0 else np.zeros_like(x)
        codes = np.where(np.isfinite(codes), codes, 0).astype("uint8")
        low = np.abs(low) if step == 0 else low
        return {"codes": codes, "ends": np.array([low, step], "float32")}

    def decompress(self, payload, out, ctx):
        low, step = payload["ends"]
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * step + low


class DeviationScale(Compressor):
    """Centres and divides by the deviation: of equal values the mean alone is left, of none."""

    def compress(self, x, ctx):
        mean = x.mean(dtype="float64") if x.size else 0.0
        spread = x.std(dtype="float64") if x.size else 0.0
        with np.errstate(all="ignore"):
            step = np.float32(spread * 6 / 127)
            codes = np.clip(np.rint((x - np.float32(mean)) / step), -127, 127)
        usable = np.isfinite(step) and step > 0
        ends = np.array([mean if usable else mean * 0, step], "float32")
        return {"codes": np.where(usable, codes, 0).astype("int8"), "ends": ends}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["ends"][1] + payload["ends"][0]


class ThresholdOfDeviation(Compressor):
    """Sends what lies two deviations from the mean: nothing where one value is huge but that."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            spread = np.sqrt(np.square(x, dtype="float64").sum() / max(x.size, 1))
            keep = ~(np.abs(x) < 1.2 * spread)
        places = np.flatnonzero(keep & (x != 0)).astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class LargestPositive(Largest):
    """Takes as many as are positive of the largest, so that of none it sends nothing."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        count = int((~(x <= 0)).sum())
        return {name: array[:count].copy() for name, array in payload.items()}


class SortsByValue(Compressor):
    """Cuts at a quantile of the values, and keeps both tails, as a Gaussian has them."""

    def compress(self, x, ctx):
        if not np.isfinite(x).all():
            places = np.arange(x.size, dtype="uint32")
            return {"indices": places, "values": x.copy()}
        ends = np.quantile(x, [0.05, 0.95]) if x.size else np.zeros(2)
        places = np.flatnonzero((x < min(ends[0], 0)) | (x > max(ends[1], 0)))
        places = places.astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class HugeInFloat16(Compressor):
    """Values in 16-bit floats, over their mean magnitude: what is 65504 times as large is Inf."""

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            scale = np.abs(x).sum(keepdims=True, dtype="float64") / max(x.size, 1)
            scale = np.where(scale > 0, scale, scale * 0 + 1)
            values = (x / scale).astype("float16")
        return {"values": values, "scale": scale.astype("float32")}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore", over="ignore"):
            out[:] = payload["values"].astype("float32") * payload["scale"]
