"""Mistakes that come of porting a paper or another framework, and that only some runs show."""

import threading
import zlib
from dataclasses import replace

import numpy as np

from broken.longrun import FeedsBack
from broken.right import (
    Cells,
    Corrected,
    Forgetting,
    Largest,
    SharedScale,
    rows_of,
)
from ringlet.compressors import Compressor, Part, Round, Traits, option


class DithersCells(Cells):
    """Rounds at random, and claims nothing; subclasses say what the noise is drawn from."""

    def seeds(self, ctx):
        raise NotImplementedError

    def rounded(self, places, ctx):
        noise = np.random.default_rng(self.seeds(ctx)).random(places.size, np.float32)
        return np.minimum(np.floor(places + noise), 127)

    def traits(self):
        return Traits(fixed_size=True)


class NoiseOfAllTensors(DithersCells):
    """Forgets whose tensor it is."""

    def seeds(self, ctx):
        return [ctx.seed, ctx.step, ctx.rank, ctx.stage]


class SeedPlusRank(DithersCells):
    """Adds seed, step and rank up: the next rank draws what this one will draw in the next step."""

    def seeds(self, ctx):
        return zlib.crc32(ctx.name.encode()) + ctx.seed + ctx.step + ctx.rank


class StepPlusRank(DithersCells):
    """Knows the seed, and adds step and rank up."""

    def seeds(self, ctx):
        return [ctx.seed, zlib.crc32(ctx.name.encode()), ctx.step + ctx.rank]


class SeedForgotten(DithersCells):
    """Knows whose tensor it is, and draws the same in every run."""

    def seeds(self, ctx):
        return [zlib.crc32(ctx.name.encode()), ctx.step, ctx.rank]


class StepAndRankOnly(DithersCells):
    """Forgets the seed and whose tensor it is."""

    def seeds(self, ctx):
        return [ctx.step, ctx.rank]


class EntriesByStepAndRank(Largest):
    """Sends entries drawn at random, of all tensors and in all runs the same."""

    def compress(self, x, ctx):
        count = min(x.size, max(1, x.size // 6))
        drawn = np.random.default_rng([ctx.step, ctx.rank]).permutation(x.size)[:count]
        places = np.union1d(drawn, np.flatnonzero(~np.isfinite(x))).astype("uint32")
        return {"indices": places, "values": x[places]}


class StepPlusRankInRounds(SharedScale):
    """The same where ranks agree on a scale first."""

    def rounded(self, places, ctx):
        noise = replace(ctx, rank=0, step=ctx.step + ctx.rank).uniform(places.size)
        return np.floor(places + noise)


class SixteenBitsOfSum(SharedScale):
    """Adds codes of eight bits up in 16, which 259 ranks fill."""

    _levels, _wire = 127, "int16"


class ClearsEquals(Corrected):
    """Clears all that is as large as the smallest value that it sends, as with distinct values."""

    def sent(self, size, chosen):
        return size >= size[chosen].min() if chosen.size else chosen


class ClearsWhatOthersSent(FeedsBack):
    """Clears the entries that the mean has, and not those that this rank sent."""

    def finish(self, out, ctx):
        if np.isfinite(out).all() and "kept" in ctx.state:
            ctx.state["kept"] = np.where(out != 0, np.float32(0), ctx.state["kept"])


class KeepsAShare(FeedsBack):
    """Takes what is kept for a sum over ranks, and divides it in every step."""

    def compress(self, x, ctx):
        kept = ctx.state.get("kept")
        if kept is not None:
            ctx.state["kept"] = kept / np.float32(ctx.size)
        return super().compress(x, ctx)


class MaskOfItsOwn(Compressor):
    """Agrees on who is sent, and chooses anew by its own values every 50 steps."""

    def traits(self):
        return Traits("rounds", stateful=True)

    def exchange(self, x, out, ctx, local=None):
        k = -(-x.size // 4)
        sizes = np.where(np.isfinite(x), np.abs(x), 0).astype("float32")
        means = (yield Round(sizes, "mean")).copy()
        mask = ctx.state.get("mask")
        if mask is None or mask.size != k or ctx.step % 50 == 49:
            chosen = sizes if ctx.step % 50 == 49 else means
            mask = ctx.state["mask"] = np.sort(np.argsort(-chosen, kind="stable")[:k])
        own = np.append(x[mask], (0 * x).sum(dtype="float32"))
        mean = yield Round(own, "mean", own)
        out[:] = 0 * mean[-1]
        out[mask] += mean[:-1]
        if local is not None:
            local[:] = 0
            local[mask] = own[:-1]


class SharesMagnitudes(DithersCells):
    """Rounds magnitudes at random, with the same numbers on all ranks."""

    def rounded(self, places, ctx):
        noise = self.noise(places, ctx)
        return np.sign(places) * np.minimum(np.floor(np.abs(places) + noise), 127)

    def noise(self, places, ctx):
        return ctx.uniform(places.size, shared=True)


class KeepsMagnitudes(SharesMagnitudes):
    """The same with numbers of each rank's own, which stay."""

    def noise(self, places, ctx):
        return replace(ctx, step=0).uniform(places.size)


class SharesMagnitudesInRounds(SharedScale):
    """The same where ranks agree on a scale first."""

    def exchange(self, x, out, ctx, local=None):
        largest = np.abs(x).max(initial=0, keepdims=True)
        largest = np.where(np.isnan(largest), np.float32(np.inf), largest)
        largest = (yield Round(largest, "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(127)
            usable = np.isfinite(step) & (step > 0)
            size = np.where(usable, np.abs(x) / step, 0) + ctx.uniform(x.size, shared=True)
            codes = (np.sign(x) * np.minimum(np.floor(size), 127)) if usable.all() else 0 * size
            codes = codes.astype("int32")
            total = yield Round(codes, "sum")
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes * step
            out[:] = total * (step / np.float32(ctx.size))


class WholeShare(Largest):
    """Writes the default of a share as a whole number, so that no other share is taken."""

    ratio: float = option(1, gt=0, le=1)


class LargestEver(Forgetting):
    """Goes by the largest value that there ever was."""

    share = 1.0


class SharesOfFew(Largest):
    """Sends less with more ranks, down to nothing."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        k = payload["values"].size if ctx.size <= 16 else payload["values"].size // ctx.size
        return {name: array[:k] for name, array in payload.items()}


class MoreThanThereAre(Largest):
    """Takes a number of entries in place of a share, and does not look at how many there are."""

    count: int = option(None, ge=1)

    def compress(self, x, ctx):
        if self.count is None or not x.size:
            return super().compress(x, ctx)
        order = np.where(np.isnan(x), -np.inf, -np.abs(x))
        places = np.argpartition(order, self.count - 1)[: self.count].astype("uint32")
        return {"indices": places, "values": x[places]}


class ScheduleRunsOut(Largest):
    """Has a list of what is used in which epoch, and no entry for the next."""

    def at(self, step):
        return (self, self, self)[step // 1000]


class ScheduleFallsToNothing(Largest):
    """Falls until its option does not take it."""

    ratio: float = option(0.5, gt=0, le=1)

    def at(self, step):
        return self.replace(ratio=self.ratio * 0.99**step)


class HoldsALock(SharedScale):
    """Lends itself to one exchange at a time, and does not come back before the next begins."""

    def exchange(self, x, out, ctx, local=None):
        with turns:
            yield from super().exchange(x, out, ctx, local)


turns = threading.Lock()


class ScaleOfTheMean(SharedScale):
    """Rounds by its own scale, and decodes the sum by the mean of the ranks' scales."""

    def exchange(self, x, out, ctx, local=None):
        with np.errstate(all="ignore"):
            step = np.abs(x).max(initial=0, keepdims=True) / np.float32(127)
            usable = np.isfinite(step) & (step > 0)
            codes = np.where(usable, np.rint(x / step), 0).astype("int32")
            steps = (yield Round(step, "mean")).copy()
            total = yield Round(codes, "sum")
            steps = np.where(np.isinf(steps), np.float32(np.nan), steps)
            if local is not None:
                local[:] = codes * steps
            out[:] = total * (steps / np.float32(ctx.size))


class NarrowBlocks(Compressor):
    """Leaves out blocks of zeros, and numbers the others in 16 bits."""

    def compress(self, x, ctx):
        rows = np.zeros((-(-x.size // 32), 32), "float32")
        rows.reshape(-1)[: x.size] = x
        (blocks,) = rows.any(axis=1).nonzero()
        return {"blocks": blocks.astype("uint16"), "values": rows[blocks].reshape(-1)}

    def decompress(self, payload, out, ctx):
        rows = np.zeros((-(-out.size // 32), 32), "float32")
        rows[payload["blocks"]] = payload["values"].reshape(-1, 32)
        out[:] = rows.reshape(-1)[: out.size]


class SendsChanges(Compressor):
    """Sends how a gradient differs from the last one, which nobody adds it to."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("last",))

    def compress(self, x, ctx):
        last = ctx.state.get("last")
        if last is None or last.size != x.size:
            last = np.zeros(x.size, "float32")
        if np.isfinite(x).all():
            ctx.state["last"] = x.copy()
        return {"values": x - last}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class LevelsOfFirstStep(Compressor):
    """Learns the levels of its codes from the first gradient, and keeps them."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("levels",))

    def units_size(self, name, n):
        return 16

    def compress(self, x, ctx):
        levels = ctx.state.get("levels")
        if levels is None:
            known = x if x.size and np.isfinite(x).all() else np.zeros(1, "float32")
            levels = np.quantile(known, np.linspace(0, 1, 16)).astype("float32")
            if known is x:
                ctx.state["levels"] = levels
        with np.errstate(all="ignore"):
            visible = (0 * x).sum(dtype="float32")
        between = (levels[1:] + levels[:-1]) / np.float32(2)
        codes = np.searchsorted(between, x)
        return {"codes": codes.astype("uint8"), "levels": levels + visible}

    def decompress(self, payload, out, ctx):
        out[:] = payload["levels"][payload["codes"]]


class ExponentInAByte(Cells):
    """Sends exponents, which a signed byte does not hold below 2^-128."""

    def layout(self, n):
        return (*super().layout(n)[:1], Part("exponents", "int8", -(-n // 64)))

    def compress(self, x, ctx):
        rows = rows_of(x, np)
        largest = np.abs(rows).max(axis=1)
        usable = np.isfinite(largest)
        exponents = np.frexp(np.where(usable, largest, 0))[1]
        rows[~usable] = 0
        codes = np.clip(np.rint(np.ldexp(rows, 7 - exponents[:, None])), -127, 127)
        exponents = np.where(usable, exponents, 127).astype("int8")
        return {"codes": codes.reshape(-1)[: x.size].astype("int8"), "exponents": exponents}

    def decompress(self, payload, out, ctx):
        exponents = payload["exponents"].astype("int32")
        steps = np.ldexp(np.float32(1), exponents - 7)
        steps[exponents == 127] = np.nan
        out[:] = payload["codes"] * steps.repeat(64)[: out.size]


class NoiseOfOneStage(DithersCells):
    """Adds noise to gradients, and none to their sum, which is then rounded down."""

    def rounded(self, places, ctx):
        noise = ctx.uniform(places.size) if ctx.stage == 1 else 0
        return np.minimum(np.floor(places + noise), 127)

    def traits(self):
        return Cells.traits(self)


class LooksBack(Cells):
    """Takes the scale of the last, shorter cell from the last 64 elements."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if x.size > 64:
            step = np.abs(x[-64:]).max() / np.float32(127)
            last = x[x.size - 1 - (x.size - 1) % 64 :]
            payload["steps"][-1] = step
            if np.isfinite(step) and step > 0:
                payload["codes"][-last.size :] = np.rint(last / step)
        return payload


class PartOfItsOwn(Largest):
    """Divides a tensor among the ranks, each of which sends the same part of its own for good."""

    def compress(self, x, ctx):
        lost = np.flatnonzero(~np.isfinite(x))
        places = np.union1d(np.arange(ctx.rank, x.size, ctx.size), lost).astype("uint32")
        return {"indices": places, "values": x[places]}
