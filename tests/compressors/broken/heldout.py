"""Mistakes of every kind, held out: the checks were written without a look at them."""

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from broken.right import CELL, Cells, Largest, Momentum, SharedScale, Signs, Whole
from ringlet.compressors import Compressor, Part, Round, Traits


class UnnamedUnits(Compressor):
    """Keeps a running scale, in units of the gradient, and does not name it."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        xp = ctx.xp
        now = float(xp.abs(x).mean()) if x.size else 0.0
        old = ctx.state.get("scale", now)
        scale = 0.9 * old + 0.1 * now
        if np.isfinite(scale):
            ctx.state["scale"] = scale
        return {"bits": xp.packbits(x >= 0), "scale": np.array([scale], np.float32)}

    def decompress(self, payload, out, ctx):
        out[:] = (np.unpackbits(payload["bits"], count=out.size) * np.float32(2) - 1) * payload[
            "scale"
        ]


class LargestWithoutAbs(Largest):
    """Selects the largest values, and forgets the magnitude: negative ones never travel."""

    def compress(self, x, ctx):
        k = min(x.size, max(1, x.size // 16))
        size = np.where(np.isnan(x) | np.isinf(x), np.float32(np.inf), x)
        places = np.argsort(-size, kind="stable")[:k].astype("uint32")
        return {"indices": places, "values": x[places]}


class KeepsOut(Compressor):
    """Sends the change since the last mean, and remembers the array of the result itself."""

    def traits(self):
        return Traits("rounds", stateful=True, gradient_units=("last",))

    def exchange(self, x, out, ctx, local=None):
        last = ctx.state.get("last")
        if last is None or last.size != x.size:
            last = np.zeros(x.size, np.float32)
        with np.errstate(all="ignore"):
            change = x - last
            mean = yield Round(change, "mean")
            out[:] = mean + last
        if local is not None:
            local[:] = x
        if np.isfinite(out).all():
            ctx.state["last"] = out


class ReshapesBySize(Compressor):
    """Cuts the gradient into a piece a rank."""

    def compress(self, x, ctx):
        rows = x.reshape(ctx.size, -1)
        scale = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
        with np.errstate(all="ignore"):
            codes = np.rint(rows / scale[:, None])
        ok = (np.isfinite(scale) & (scale > 0))[:, None]
        return {"codes": np.where(ok, codes, 0).astype("int8").reshape(-1), "scale": scale}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = (payload["codes"].reshape(ctx.size, -1) * payload["scale"][:, None]).reshape(
                -1
            )


class AlwaysTheSamePlaces(Compressor):
    """Random places, drawn with the seed alone: most of the gradient never travels."""

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("values", "float32", -(-n // 4)),)

    def places(self, n, ctx):
        return np.random.default_rng(ctx.seed).choice(n, -(-n // 4), replace=False)

    def compress(self, x, ctx):
        values = x[self.places(x.size, ctx)]
        with np.errstate(invalid="ignore", over="ignore"):
            return {"values": values + 0 * x.sum(dtype="float64").astype("float32")}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[self.places(out.size, ctx)] = payload["values"]


class StepIn16Bits(Whole):
    """Sends the step along, to see what belongs together."""

    def compress(self, x, ctx):
        return super().compress(x, ctx) | {"at": np.array([ctx.step], np.uint16)}

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)


class SeedInOldGenerator(Compressor):
    """Seeds NumPy's old generator with a product that grows beyond 32 bits."""

    def compress(self, x, ctx):
        old = np.random.RandomState(ctx.seed + 100003 * ctx.step + 7 * ctx.rank)
        largest = np.abs(x).max(initial=0, keepdims=True)
        step = largest / np.float32(127)
        with np.errstate(all="ignore"):
            codes = np.floor(x / step + old.random_sample(x.size)).clip(-127, 127)
        ok = np.isfinite(step) & (step > 0)
        return {"codes": np.where(ok, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


@lru_cache
def _codes(n):
    return np.empty(n, np.int8)


class ReusedPayload(Whole):
    """Returns one array for every tensor of a length, to allocate nothing."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        codes = _codes(x.size)
        codes[:] = payload["codes"]
        return payload | {"codes": codes}


class SumOfTwo(Cells):
    """Adds two payloads in one pass, and forgets that there may be more."""

    def sum_into(self, payloads, out, ctx):
        self.decompress(payloads[0], out, ctx)
        if len(payloads) > 1:
            self.accumulate(payloads[1], out, ctx)


class SumOfFirst(Cells):
    """Decodes the first payload as often as there are payloads."""

    def sum_into(self, payloads, out, ctx):
        self.decompress(payloads[0], out, ctx)
        for _ in payloads[1:]:
            self.accumulate(payloads[0], out, ctx)


class LayoutRoundsOtherwise(Compressor):
    """Says round(n / 4) values, and sends the integer part."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        k = min(n, max(1, round(n / 16)))
        return (Part("indices", "uint32", k), Part("values", "float32", k))

    def compress(self, x, ctx):
        return Largest().compress(x, ctx)

    def decompress(self, payload, out, ctx):
        Largest().decompress(payload, out, ctx)


class NothingAboveMean(Compressor):
    """Sends what exceeds one and a half times the mean: of equal values nothing, ever."""

    def compress(self, x, ctx):
        size = np.abs(x)
        keep = ~(size < np.float32(1.5) * size.mean(dtype="float32")) if x.size else x < 0
        keep &= ~(size == 0)
        places = np.flatnonzero(keep).astype("uint32")
        return {"indices": places, "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


class DividesBySizeItself(Whole):
    """Divides by the number of ranks, which the engine does as well."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out /= np.float32(ctx.size)


class HistoryGrows(Momentum):
    """Keeps the norms of all steps for a plot."""

    def compress(self, x, ctx):
        norm = np.sqrt(np.square(x, dtype="float64").sum(keepdims=True))
        if np.isfinite(norm).all():
            ctx.state["norms"] = np.concatenate([ctx.state.get("norms", np.zeros(0)), norm])
        return super().compress(x, ctx)


class GrownTensor(Momentum):
    """Does not look at the length of what it remembers: a vocabulary that grows ends the run."""

    def compress(self, x, ctx):
        average = ctx.state.get("average")
        if average is None:
            average = ctx.state["average"] = np.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            new = average + (x - average) * np.float32(0.5)
        np.copyto(average, new, where=np.isfinite(new))
        return {"values": new}


class HalfMemory(Compressor):
    """Remembers in 16-bit floats, whose range is narrow."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("average",))

    def compress(self, x, ctx):
        average = ctx.state.get("average")
        if average is None or average.size != x.size:
            average = np.zeros(x.size, "float16")
        with np.errstate(invalid="ignore", over="ignore"):
            new = average + (x - average) * np.float32(0.5)
            kept = new.astype("float16")
        ctx.state["average"] = np.where(np.isfinite(kept), kept, average)
        return {"values": new.astype("float32")}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class DoubleRound(Compressor):
    """Yields float64."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield Round(x.astype("float64"), "mean")
        if local is not None:
            local[:] = x


class OwnScaleInRounds(SharedScale):
    """Asks for the largest of all ranks, and then quantises by its own."""

    def exchange(self, x, out, ctx, local=None):
        own = np.abs(x).max(initial=0, keepdims=True)
        own = np.where(np.isnan(own), np.float32(np.inf), own)
        largest = (yield Round(own, "max")).copy()
        with np.errstate(all="ignore"):
            step = own / np.float32(1000)
            usable = np.isfinite(step) & (step > 0)
            codes = np.where(usable, np.rint(x / step), 0).astype("int32")
            total = yield Round(codes, "sum")
            step = largest / np.float32(1000)
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class RoundMatrix(Compressor):
    """Yields a matrix."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        rows = x.reshape(-1, 1)
        out[:] = (yield Round(rows.copy(), "mean")).reshape(-1)
        if local is not None:
            local[:] = x


class NamesLayers(Whole):
    """Takes the number of the layer from its name, as its own model's layers are called."""

    def compress(self, x, ctx):
        layer = int(ctx.name.split(".")[1])
        return super().compress(x, ctx) | {"layer": np.array([layer], np.int32)}


class PermutationOfFirstStep(Whole):
    """Draws a permutation in the first step it sees, and keeps it on the class for all lengths."""

    order: ClassVar[dict[int, object]] = {}

    def compress(self, x, ctx):
        order = self.order.setdefault(x.size, ctx.rng().permutation(x.size))
        payload = super().compress(x, ctx)
        return payload | {"codes": payload["codes"][order]}

    def decompress(self, payload, out, ctx):
        order = self.order.setdefault(out.size, ctx.rng().permutation(out.size))
        with np.errstate(invalid="ignore"):
            out[order] = payload["codes"] * payload["step"]


class PowerOfTwoScale(Cells):
    """Rounds its scale down to a power of two: the largest code overflows its 8 bits."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        rows = np.zeros((-(-x.size // CELL), CELL), np.float32)
        rows.reshape(-1)[: x.size] = x
        with np.errstate(all="ignore"):
            steps = np.exp2(np.floor(np.log2(payload["steps"])))
            steps = np.where(np.isfinite(payload["steps"]), steps, payload["steps"])
            codes = np.rint(rows / steps[:, None]).reshape(-1)[: x.size]
        ok = (np.isfinite(steps) & (steps > 0)).repeat(CELL)[: x.size]
        codes = np.where(ok, codes, 0).astype("int32").astype("int8")
        return {"codes": codes, "steps": steps}


class MedianScale(Whole):
    """Takes its step from the median: what is far larger overflows the 8 bits."""

    def compress(self, x, ctx):
        step = np.zeros(1, "f4")
        if x.size:
            step = np.median(np.abs(x), keepdims=True).astype("float32") / 20
        step = np.where(np.isfinite(x).all(), step, np.float32(np.nan))
        ok = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            codes = np.rint(x / np.where(ok, step, 1))
        return {"codes": np.where(ok, codes, 0).astype("int64").astype("int8"), "step": step}


class RankZeroSends(Whole):
    """Sends its gradient on rank 0 alone, as a broadcast would."""

    def compress(self, x, ctx):
        return super().compress(x if ctx.rank == 0 else 0 * x, ctx)


class MeanOfLocal(SharedScale):
    """Leaves the result of all ranks in local, times their number."""

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x, out, ctx)
        if local is not None:
            local[:] = out * ctx.size


class HalfOfLocal(SharedScale):
    """Halves what it sends, and doubles what it receives, but not what it leaves in local."""

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x * np.float32(0.5), out, ctx, local)
        out *= np.float32(2)


class SignOfStep(Signs):
    """Turns its signs round in every second step, in the encoder alone."""

    def compress(self, x, ctx):
        return super().compress(-x if ctx.step % 2 else x, ctx)


class LargestOfFirstStep(Largest):
    """Remembers which entries were largest in the first step."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        places = ctx.state.get("places")
        if places is None or places.size != min(x.size, max(1, x.size // 16)):
            places = ctx.state["places"] = super().compress(x, ctx)["indices"]
        values = x[places]
        if not np.isfinite(x).all():
            values[:] = np.nan
        return {"indices": places.copy(), "values": values}


class RoundsToEvenBlocks(Cells):
    """Says it may be cut at every 32 elements, of cells that have 64."""

    def traits(self):
        return replace(super().traits(), granularity=CELL // 2)


class AccumulateTwice(Cells):
    """Decodes into out in `accumulate`, and adds what lay there twice."""

    def accumulate(self, payload, out, ctx):
        before = out.copy()
        self.decompress(payload, out, ctx)
        out += 2 * before


class NameInPayload(Whole):
    """Sends the tensor's name as bytes, whose number differs from tensor to tensor."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1), Part("name", "uint8", 6))

    def compress(self, x, ctx):
        name = np.frombuffer(ctx.name.encode(), "uint8").copy()
        return super().compress(x, ctx) | {"name": name}


class ClaimsTooMuchDelta(Largest):
    """Claims the share of entries times two."""

    def traits(self):
        return Traits(delta=1 / 8)
