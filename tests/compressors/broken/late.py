"""Mistakes that begin after many steps, or show in some steps alone."""

import functools

import numpy as np

from broken.right import Largest, Whole
from ringlet.compressors import Compressor, Round, Traits


class ClearsInTheTenthStep(Largest):
    """Takes what it has sent out of the gradient, in every tenth step."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step % 10 == 9:
            x[payload["indices"]] = 0
        return payload


class MaxOfWarm(Whole):
    """Looks for the largest entry behind a warm-up, where an empty shard has none."""

    def compress(self, x, ctx):
        if ctx.step >= 30:
            x.max()
        return super().compress(x, ctx)


class ComparesWhenWarm(Largest):
    """Sends what is above half of the largest behind a warm-up, which NaN is not."""

    def compress(self, x, ctx):
        if ctx.step < 30 or not x.size:
            return super().compress(x, ctx)
        size = np.abs(x)
        (places,) = np.nonzero(size >= np.nanmax(np.where(np.isinf(x), 0, size)) / 2)
        return {"indices": places.astype("uint32"), "values": x[places]}


class FadesAway(Compressor):
    """Sends fewer entries from step to step, in the end none; NaN is sent for good."""

    def compress(self, x, ctx):
        left = max(0.0, 1 - ctx.step / 1_000_000)
        order = np.argsort(-np.abs(x), kind="stable")[: int(np.ceil(x.size / 4 * left))]
        (bad,) = np.nonzero(~np.isfinite(x))
        places = np.union1d(order, bad)
        return {"indices": places.astype("uint32"), "values": x[places]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]


@functools.cache
def draws(key, n):
    return np.random.default_rng(key).random(n, "float32")


class KeepsDrawsForGood(Compressor):
    """Rounds at random, and keeps the random numbers of every step."""

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(7)
        with np.errstate(all="ignore"):
            codes = np.sign(x) * np.minimum(
                np.floor(np.abs(x) / step + draws(ctx.key(), x.size)), 7
            )
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        out[:] = payload["codes"] * payload["step"]


class NotesEveryFifty(Largest):
    """Writes down which steps were the 50th, the 100th, and so on."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        if ctx.step % 50 == 0:
            ctx.state[f"step {ctx.step}"] = ctx.step
        return super().compress(x, ctx)


class NotesEveryHundredth(Largest):
    """Writes down how often it was called, every hundred times, which it counts by itself."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        calls = ctx.state["calls"] = ctx.state.get("calls", 0) + 1
        if calls % 100 == 0:
            held = ctx.state.get("notes", np.zeros(0, "int64"))
            ctx.state["notes"] = np.append(held, calls)
        return super().compress(x, ctx)


class LeaderAlone(Compressor):
    """Ranks choose in turn what all send, and nobody looks for NaN elsewhere."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        chosen = np.zeros(-(-x.size // 4), "int32")
        if ctx.step % ctx.size == ctx.rank:
            size = np.where(np.isnan(x), np.inf, np.abs(x))
            chosen[:] = np.argsort(-size, kind="stable")[: chosen.size]
        chosen = (yield Round(chosen, "sum")).copy()
        values = x[chosen]
        mean = yield Round(values, "mean", values)
        out[:] = 0
        out[chosen] = mean
        if local is not None:
            local[:] = 0
            local[chosen] = values


class ScratchWhenWarm(Whole):
    """Sends scratch behind a warm-up."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step < 100:
            return payload
        codes = ctx.workspace.array("codes", x.size, "int8")
        codes[:] = payload["codes"]
        return payload | {"codes": codes}


class NotesBeforeEveryFifty(Largest):
    """Writes down steps 49, 99, and so on, after each of which fifty have gone."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        if (ctx.step + 1) % 50 == 0:
            ctx.state[f"step {ctx.step}"] = ctx.step
        return super().compress(x, ctx)


class NotesWhenWarm(Largest):
    """Keeps a list of its largest values, behind a warm-up."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step >= 30:
            before = ctx.state.get("largest", np.zeros(0, "float32"))
            ctx.state["largest"] = np.append(before, payload["values"][:1])
        return payload


class LosesTheLastWhenWarm(Whole):
    """Leaves the last element out behind a warm-up."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step >= 10:
            payload["codes"][-1:] = 0
        return payload


class EpsilonWhenWarm(Whole):
    """Adds an epsilon to its scale behind a warm-up, where gradients are small."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step < 300:
            return payload
        step = payload["step"] + np.float32(1e-6)
        with np.errstate(all="ignore"):
            codes = np.where(np.isfinite(step), np.rint(x / step), 0)
        return {"codes": codes.astype("int8"), "step": step}
