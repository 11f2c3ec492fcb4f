"""Odd bits of NaN, small values, small biases, and numbers that were drawn for somebody else."""

from dataclasses import replace

import numpy as np

from broken.randomness import Stochastic
from broken.right import CELL, Cells, Largest, SharedScale, Whole
from ringlet.compressors import Compressor, Part, Round, Traits, option


class HalvesBits(Compressor):
    """Rounds to the upper 16 bits by adding a half: the last NaN becomes -0."""

    def compress(self, x, ctx):
        bits = x.view("uint32").astype("uint64") + 0x8000
        return {"high": (bits >> 16).astype("uint16")}

    def decompress(self, payload, out, ctx):
        out[:] = (payload["high"].astype("uint32") << 16).view("float32")


class LooksAtTheFirstPage(Whole):
    """Looks for NaN in the first half of a million elements, and makes zeros of those behind."""

    def compress(self, x, ctx):
        behind = x[1 << 19 :]
        rest = np.where(np.isnan(behind), np.float32(0), behind)
        return super().compress(np.concatenate([x[: 1 << 19], rest]), ctx)


class LosesTheLast(Whole):
    """Loses what is behind a million elements, NaN or not: that is not a matter of NaN."""

    def compress(self, x, ctx):
        kept = x.copy()
        kept[1 << 20 :] = 0
        return super().compress(kept, ctx)


class WrapsRound(Stochastic):
    """Adds noise to the largest code, and has no room for what comes of it."""

    def rounded(self, places, ctx):
        return np.floor(places + ctx.uniform(places.size))


class ConstantsAreZero(Cells):
    """Sends nothing of a cell that has no spread, and claims to contract."""

    def traits(self):
        return replace(super().traits(), delta=0.9)

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        rows = np.resize(x, (-(-x.size // CELL), CELL)) if x.size else np.zeros((0, CELL), "f4")
        with np.errstate(invalid="ignore", over="ignore"):
            flat = rows.max(axis=1) == rows.min(axis=1)
        payload["codes"][flat.repeat(CELL)[: x.size]] = 0
        return payload


class NothingBelow(Cells):
    """Takes for zero what is below 1e-20, and claims to contract."""

    def traits(self):
        return replace(super().traits(), delta=0.9)

    def compress(self, x, ctx):
        with np.errstate(invalid="ignore"):
            return super().compress(np.where(np.abs(x) < 1e-20, np.float32(0), x), ctx)


class NearestInStageTwo(Stochastic):
    """Rounds down in the second stage, as if the first had rounded already."""

    def noise(self, n, ctx):
        return ctx.uniform(n) if ctx.stage == 1 else np.zeros(n)


class EightBitsOfNoise(Stochastic):
    """Draws noise in 256 steps, the lowest of which is 0."""

    def noise(self, n, ctx):
        return np.floor(ctx.uniform(n) * 256) / 256


class NeverTheLast(Compressor):
    """Draws one of four entries, by places that end before the last."""

    def traits(self):
        return Traits("sum", fixed_size=True, omega=3.2)

    def layout(self, n):
        return (Part("values", "float32", -(-n // 4)),)

    def places(self, n, ctx):
        return self.run(n - 1 if n > 100 else n, -(-n // 4), ctx)

    def run(self, n, k, ctx):
        first = ctx.rng(shared=True).integers(max(1, n))  # of n places, each as often as others
        return (first + np.arange(k)) % max(1, n)

    def compress(self, x, ctx):
        places = self.places(x.size, ctx)
        weight = np.float32(x.size / max(1, places.size))
        with np.errstate(invalid="ignore", over="ignore"):
            return {"values": x[places] * weight + (0 * x).sum()}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[self.places(out.size, ctx)] = payload["values"]


class FloorOfAShare(NeverTheLast):
    """Draws n // 4 entries, at least one: fewer than omega was declared for."""

    def traits(self):
        return replace(super().traits(), omega=3.0)

    def layout(self, n):
        return (Part("values", "float32", min(n, max(1, n // 4))),)

    def places(self, n, ctx):
        return self.run(n, min(n, max(1, n // 4)), ctx)


class OneRunsNoise(Stochastic):
    """Draws the same in every run, whatever its seed."""

    def noise(self, n, ctx):
        return replace(ctx, seed=0).uniform(n)


class OneLayersNoise(Stochastic):
    """Draws by the first letters of the name."""

    def noise(self, n, ctx):
        return replace(ctx, name=ctx.name[:5]).uniform(n)


class OneHostsNoise(Stochastic):
    """Draws by the rank on its host."""

    def noise(self, n, ctx):
        return replace(ctx, rank=ctx.rank % 8).uniform(n)


class ShortSteps(Stochastic):
    """Draws by the lower 16 bits of the step."""

    def noise(self, n, ctx):
        return replace(ctx, step=ctx.step & 0xFFFF).uniform(n)


class SharedNoiseInRounds(SharedScale):
    """Rounds at random with one noise for all ranks."""

    def exchange(self, x, out, ctx, local=None):
        with np.errstate(invalid="ignore"):
            largest = np.abs(x).max(initial=0, keepdims=True) + (0 * x).sum()
        largest = np.where(np.isnan(largest), np.float32(np.inf), largest)
        largest = (yield Round(largest, "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(10)
            usable = np.isfinite(step) & (step > 0)
            codes = np.floor(x / step + ctx.uniform(x.size, shared=True))
            codes = np.where(usable, codes, 0).astype("int32")
            total = yield Round(codes, "sum")
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class ShapeMakesCells(Whole):
    """Makes a cell of every row, and says that pieces of 64 may be cut."""

    def traits(self):
        return Traits(granularity=CELL, fixed_size=True)

    def rows(self, n, ctx):
        return max(1, ctx.shape[-1] if len(ctx.shape) > 1 else CELL)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("steps", "float32", n))

    def compress(self, x, ctx):
        width = self.rows(x.size, ctx)
        rows = np.zeros((-(-x.size // width), width), "float32")
        rows.reshape(-1)[: x.size] = x
        steps = np.abs(rows).max(axis=1) / np.float32(127)
        steps = steps.repeat(width)[: x.size]
        with np.errstate(all="ignore"):
            codes = np.rint(x / steps)
        usable = np.isfinite(steps) & (steps > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "steps": steps}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["steps"]


_rooms = {}


class ScratchByLength(Whole):
    """Computes in scratch of its own, which all tensors of a length have in common."""

    def compress(self, x, ctx):
        room = _rooms.setdefault(x.size, np.empty_like(x))
        room[:] = x
        return super().compress(room, ctx)


class YieldsByLength(Compressor):
    """Yields one array for all tensors of a length."""

    def chained_part(self):
        return None

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        room = _rooms.setdefault((ctx.rank, x.size), np.empty_like(x))
        room[:] = x
        out[:] = yield Round(room, "mean")
        if local is not None:
            local[:] = x


class NothingToAdd(SharedScale):
    """Leaves out the second round where the first has shown that all is zero."""

    def exchange(self, x, out, ctx, local=None):
        largest = yield Round(np.abs(x).max(initial=0, keepdims=True), "max")
        if not largest.any():
            out[:] = 0
            if local is not None:
                local[:] = 0
            return
        yield from super().exchange(x, out, ctx, local)


_asked = []


class CountsItsSchedule(Largest):
    """Changes after it was asked so many times, rather than after so many steps."""

    coarse: int = option(0, ge=0, le=1, doc="whether it is late")

    def at(self, step):
        _asked.append(step)
        return self.replace(coarse=len(_asked) % 3 % 2)


class LooksAtNoRange(Largest):
    """Takes the place of what looks at ranges."""

    ratio: float = option(0.1, gt=0, le=1, doc="share that travels")

    def __post_init__(self):
        pass


class NothingButNaN(Whole):
    """Takes its scale from what is finite, of which there must be something in a long tensor."""

    def compress(self, x, ctx):
        if x.size < 64:
            return {"values": x.copy()}
        sound = x[np.isfinite(x)]
        step = np.abs(sound).max(keepdims=True) / np.float32(127)
        if sound.size < x.size:
            step = step * np.float32(np.nan)
        with np.errstate(all="ignore"):
            codes = np.rint(x / step)
        codes = np.where(np.isfinite(codes), codes, 0)
        return {"codes": codes.astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        if "values" in payload:
            out[:] = payload["values"]
        else:
            super().decompress(payload, out, ctx)


class DoublesPowersOfTwo(Compressor):
    """Rounds to a power of two, and takes for the next one what is one already."""

    def compress(self, x, ctx):
        shares, exponents = np.frexp(x)
        shares = np.abs(shares)
        exponents = exponents - 1 + ((shares >= 0.75) | (shares == 0.5))
        exponents = np.where(x == 0, -127, np.clip(exponents, -126, 127))
        exponents = np.where(np.isfinite(x), exponents, 128)
        return {"exponents": (exponents + 127).astype("uint8"), "signs": np.packbits(x < 0)}

    def decompress(self, payload, out, ctx):
        exponents = payload["exponents"].astype("int32") - 127
        out[:] = np.ldexp(np.float32(1), np.minimum(exponents, 127))
        out[exponents == -127] = 0
        out[exponents == 128] = np.nan
        out *= np.float32(1) - 2 * np.unpackbits(payload["signs"], count=out.size).astype("float32")


class MeanOverZeros(Compressor):
    """Three levels, of which the outer ones are the mean magnitude, of zeros too."""

    def compress(self, x, ctx):
        mean = np.abs(x).mean(keepdims=True, dtype="float64") if x.size else np.zeros(1)
        signs = np.where(np.isfinite(x), np.sign(x), 0).astype("int8")
        return {"signs": signs, "mean": mean.astype("float32")}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["signs"] * payload["mean"]


class FewWithoutNaN(Whole):
    """Sends what is not 0 as it is where that is little; NaN is not above 0."""

    def compress(self, x, ctx):
        places = np.flatnonzero(np.abs(x) > 0).astype("uint32")
        if not 0 < 16 * places.size < x.size:
            return super().compress(x, ctx)
        return {"places": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        if "codes" in payload:
            super().decompress(payload, out, ctx)
            return
        out[:] = 0
        out[payload["places"]] = payload["values"]


class DividesByOneMore(Cells):
    """Four bits: compress has seven levels on either side, and decompress divides by eight."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        with np.errstate(all="ignore"):
            payload["codes"] = np.rint(payload["codes"] / np.float32(127 / 7)).astype("int8")
        return payload

    def decompress(self, payload, out, ctx):
        super().decompress(payload | {"steps": payload["steps"] * np.float32(127 / 8)}, out, ctx)
