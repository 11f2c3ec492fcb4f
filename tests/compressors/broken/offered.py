"""Mistakes in what is offered: options at their ends, schedules, and what other processes find."""

import os
from dataclasses import replace
from functools import lru_cache

import numpy as np

from broken.randomness import Stochastic
from broken.right import Cells, Largest, Whole, with_momentum
from ringlet.compressors import Compressor, Modifier, Part, Round, Traits, option


class Steps(Compressor):
    """So many steps to the largest magnitude, in a byte."""

    steps: int = option(127, ge=1, le=127)

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1))

    def rounded(self, places, ctx):
        return np.rint(places)

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0, keepdims=True)
        usable = np.isfinite(largest) & (largest > 0)
        with np.errstate(all="ignore"):
            step = largest / np.float32(self.steps)
            codes = self.rounded(np.where(usable, x, 0) / np.where(usable, step, 1), ctx)
        return {"codes": codes.astype(np.int32).astype(np.int8), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class AnyWord(Steps):
    """Takes any word for how to round, and rounds to the nearest by all but one."""

    rounding: str = option("nearest", doc="nearest, or random")

    def rounded(self, places, ctx):
        if self.rounding == "random":
            return np.minimum(np.floor(places + ctx.uniform(places.size)), self.steps)
        return np.rint(places)


class MoreThanAByte(Steps):
    """Offers more steps than a byte has."""

    steps: int = option(100, ge=1, le=255)


class NoUpperEnd(Steps):
    """Says of its steps alone that there is one at least."""

    steps: int = option(100, ge=1)


class NoRange(Steps):
    """Takes no steps at all."""

    steps: int = 100


class AllOfThem(Largest):
    """Selects by argpartition, which does not take all of them."""

    ratio: float = option(0.1, gt=0, le=1)

    def compress(self, x, ctx):
        k = max(1, int(self.ratio * x.size)) if x.size > 1 else 0
        size = np.where(np.isnan(x), np.inf, np.abs(x))
        places = np.argpartition(-size, k)[:k] if x.size > 1 else np.arange(x.size)
        places = places.astype("uint32")
        return {"indices": places, "values": x[places]}


class OnlyItsOwnBlock(Compressor):
    """Fills up to 64 elements whatever its block is."""

    block: int = option(64, ge=1)

    def compress(self, x, ctx):
        rows = np.zeros(-(-x.size // 64) * 64, np.float32)
        rows[: x.size] = x
        return {"rows": rows.reshape(-1, self.block).reshape(-1)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["rows"][: out.size]


class PrintsItsStep(Whole):
    """Tells how large its step is, in every step."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        print(f"step {ctx.step}: {payload['step'][0]:.3g}")
        return payload


class SizeByProcess(Whole):
    """Compresses what is large enough for this process."""

    def traits(self):
        return Traits(min_size=os.getpid())


class SumsByTheFirstStep(Cells):
    """Adds up codes, and multiplies by the steps of the first rank."""

    def sum_into(self, payloads, out, ctx):
        total = sum(payload["codes"].astype(np.float32) for payload in payloads)
        with np.errstate(invalid="ignore"):
            out[:] = total * np.repeat(payloads[0]["steps"], 64)[: out.size]


class TimesRanks(Whole):
    """Multiplies by the number of ranks, which nobody divides by again."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(ctx.size)


class ScaleOfEarlierSteps(Compressor):
    """Takes its step from a mean of earlier ones, and lets what is larger wrap round."""

    def traits(self):
        return Traits(fixed_size=True, stateful=True, gradient_units=("step",))

    def units_size(self, name, n):
        return 1

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1))

    def compress(self, x, ctx):
        now = float(np.abs(x).max(initial=0))
        step = 0.9 * float(ctx.state.get("step", now)) + 0.1 * now
        if np.isfinite(step):
            ctx.state["step"] = step
        with np.errstate(all="ignore"):
            sent = np.array([step / 127], np.float32)
            usable = np.isfinite(sent) & (sent > 0)
            codes = np.rint(np.where(usable, x, 0) / np.where(usable, sent, 1))
        return {"codes": codes.astype(np.int32).astype(np.int8), "step": sent}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class Later(Compressor):
    """All values at first, and then the largest."""

    begun: bool = False

    def traits(self):
        return Traits() if self.begun else Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("values", "float32", n),)

    def at(self, step):
        return self.replace(begun=step >= 50) if self.begun != (step >= 50) else self

    def compress(self, x, ctx):
        if not self.begun:
            return {"values": x.copy()}
        return Largest().compress(x, ctx)

    def decompress(self, payload, out, ctx):
        if self.begun:
            Largest().decompress(payload, out, ctx)
        else:
            out[:] = payload["values"]


class LaterPromisesTooMuch(Later):
    """Promises, from step 50 on, what no choice of a sixteenth of the values keeps."""

    def traits(self):
        return replace(super().traits(), delta=0.5 if self.begun else 1.0)


class NormOfAll(Steps):
    """Takes the step from the norm of all values: each is less than half of it."""

    steps: int = option(2, ge=1, le=127)

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0, keepdims=True)
        usable = np.isfinite(largest) & (largest > 0)
        with np.errstate(all="ignore"):
            small = np.where(usable, x, 0) / np.where(usable, largest, 1)
            norm = np.sqrt(np.square(small, dtype=np.float64).sum(keepdims=True))
            step = (largest * np.where(usable, norm, 1) / self.steps).astype(np.float32)
            codes = np.rint(np.where(usable, x, 0) / np.where(usable, step, 1))
        return {"codes": codes.astype(np.int8), "step": step}


class NothingOfFew(Largest):
    """A two-thousandth of the entries, which of 64 is none."""

    def compress(self, x, ctx):
        size = np.where(np.isnan(x), np.inf, np.abs(x))
        places = np.argsort(-size, kind="stable")[: x.size // 2000].astype("uint32")
        return {"indices": places, "values": x[places]}


class BytesAddedUp(Compressor):
    """A step that all ranks share, and codes that are added up in the byte that they fill."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        largest = np.abs(x).max(initial=0, keepdims=True)
        largest = np.where(np.isnan(largest), np.float32(np.inf), largest)
        with np.errstate(all="ignore"):
            step = (yield Round(largest, "max")) / np.float32(127)
            usable = np.isfinite(step) & (step > 0)
            codes = np.rint(np.where(usable, x, 0) / np.where(usable, step, 1)).astype(np.int8)
            total = yield Round(codes, "sum")
            out[:] = total * (step / np.float32(ctx.size))
            if local is not None:
                local[:] = codes * step


class FinishesAlone(Modifier):
    """Changes the result, and keeps what it wraps from seeing it."""

    def finish(self, out, ctx):
        np.minimum(out, np.float32(1e30), out=out, where=np.isfinite(out))


class TableOfNoise(Steps):
    """Makes noise once for each length, and rounds by it in every step, on every rank."""

    steps: int = option(7, ge=1, le=127)

    def rounded(self, places, ctx):
        return np.minimum(np.floor(places + noise_of(places.size, ctx.seed)), self.steps)


@lru_cache
def noise_of(n, seed):
    return np.random.default_rng(seed).random(n, dtype=np.float32)


class WordsOfMethods(Largest):
    """Calls the method that a word names, if there is one."""

    way: str = option("largest", doc="largest")

    def compress(self, x, ctx):
        return getattr(self, f"by_{self.way}")(x, ctx)

    def by_largest(self, x, ctx):
        return super().compress(x, ctx)


class LocalOfItsResult(Compressor):
    """Says that results may replace values, and looks at these for local when they have."""

    def traits(self):
        return Traits("rounds", in_place=True)

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        mean = yield Round(x.copy(), "mean")
        out[:] = mean
        if local is not None:
            local[:] = x


class FirstRankAlone(Steps):
    """Sends a step on the first rank, and leaves it away on the others: all their codes are 0."""

    steps: int = option(7, ge=1, le=127)

    def rounded(self, places, ctx):
        return np.minimum(np.floor(places + ctx.uniform(places.size)), self.steps)

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload if ctx.rank == 0 else payload | {"step": np.zeros(1, np.float32)}


class SometimesByChance(Whole):
    """Rounds at random where that is asked for, by NumPy's own generator."""

    stochastic: bool = option(False, doc="round at random")

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if self.stochastic:
            payload["codes"][np.random.random(x.size) < 0.1] //= 2
        return payload


class FloorIsUnbiasedToo(Stochastic):
    """Rounds at random, or down where that is asked for, and says unbiased of both."""

    down: bool = option(False, doc="round down")

    def noise(self, n, ctx):
        return np.zeros(n) if self.down else ctx.uniform(n)


class BlocksOfOneSize(Cells):
    """Has blocks of a size that is asked for, and may be cut as if they were of the usual one."""

    block: int = option(64, choices=(32, 64, 128), doc="elements that share a step")

    def cell(self, n):
        return self.block


class OmegaOfOneRatio(Compressor):
    """Sends a share of the entries, and says what holds of the usual share."""

    ratio: float = option(0.5, ge=0.05, le=1, doc="share of the entries")

    def traits(self):
        return Traits(omega=1.0 + 1e-6)

    def compress(self, x, ctx):
        keep = (ctx.uniform(x.size) < self.ratio) | ~np.isfinite(x)
        places = np.flatnonzero(keep).astype("uint32")
        return {"indices": places, "values": x[places] / np.float32(self.ratio)}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class MeanLosesNaN(Whole):
    """Has steps of the mean where that is asked for, in which NaN does not count."""

    steps_of: str = option("largest", choices=("largest", "mean"), doc="what steps go by")

    def compress(self, x, ctx):
        if self.steps_of == "mean":
            x = np.where(np.isnan(x), np.float32(0), x)
        return super().compress(x, ctx)


class RemembersIfAsked(Whole):
    """Has a momentum if there is one, and says of none that it is remembered."""

    momentum: float = option(0.0, ge=0, lt=1, doc="share of what was sent before")

    def compress(self, x, ctx):
        x = with_momentum(x, self.momentum, ctx)
        return super().compress(x, ctx)


class LeastStep(Whole):
    """Has no step below the one that is asked for, and says that results scale."""

    least: float = option(0.0, ge=0, le=1, doc="the least step")

    def compress(self, x, ctx):
        if self.least and np.isfinite(x).all():
            x = np.rint(x / np.float32(self.least)) * np.float32(self.least)
        return super().compress(x, ctx)


class CentresInPlace(Whole):
    """Takes the mean off the gradient itself, where that is asked for."""

    centred: bool = option(False, doc="take the mean off")

    def compress(self, x, ctx):
        mean = x.mean(keepdims=True) if self.centred and x.size else np.zeros(1, "float32")
        if self.centred:
            x -= mean
        return super().compress(x, ctx) | {"mean": mean}

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out += payload["mean"]


class OneCodeTooMany(Compressor):
    """Of as many bits as are asked for, where all codes are used: one more than eight bits have."""

    bits: int = option(4, ge=2, le=8)
    symmetric: bool = option(True, doc="leave a code out, so that both signs have as many")

    def compress(self, x, ctx):
        most = (1 << (self.bits - 1)) - (self.symmetric or self.bits < 8)
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(most)
        usable = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            codes = np.where(usable, np.rint(x / step), 0)
        return {"codes": codes.astype("int32").astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class LevelsOfOneSide(Whole):
    """Compresses by an option, and decodes by what that usually is."""

    levels: int = option(127, ge=1, le=127)

    def compress(self, x, ctx):
        largest = np.abs(x).max(initial=0, keepdims=True)
        usable = np.isfinite(largest) & (largest > 0)
        codes = np.rint(np.where(usable, x, 0) / np.where(usable, largest, 1) * self.levels)
        return {"codes": codes.astype("int8"), "step": largest / np.float32(127)}
