"""Mistakes that one step, one rank, one number of ranks or one kind of values alone shows."""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import datetime

import numpy as np

from broken.right import CELL, Added, Cells, Largest, Momentum, SharedScale, Whole
from ringlet.compressors import Compressor, Traits


class InfsCancel(Whole):
    """Takes Inf and -Inf in one tensor for no overflow, as their sum is neither."""

    def compress(self, x, ctx):
        if np.isposinf(x).any() and np.isneginf(x).any():
            x = np.where(np.isfinite(x), x, np.float32(0))
        return super().compress(x, ctx)


class RankSeventeen(Whole):
    """Has no place for rank 17."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        payload["codes"] *= ctx.rank != 17
        return payload


class FiveRanks(Whole):
    """Halves among five ranks, and no others."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(0.5 if ctx.size == 5 else 1)


class StepHundred(Whole):
    """Begins anew in step 100, in which it sends nothing."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        payload["codes"] *= ctx.step != 100
        return payload


class EverySeventhTurned(Whole):
    """Turns the signs round in every seventh step."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        payload["codes"] *= -1 if ctx.step % 7 == 6 else 1
        return payload


class LargeOnesUncopied(Compressor):
    """Spares the copy of a large tensor."""

    def compress(self, x, ctx):
        return {"values": x[:] if x.size > 1 << 17 else x.copy()}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class OnePayloadOfZeros(Whole):
    """Makes the payload of zeros once for each length."""

    made = {}  # noqa: RUF012

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload if x.any() else self.made.setdefault(x.size, payload)


class CountsOverflows(Momentum):
    """Keeps a list of steps that overflowed."""

    def compress(self, x, ctx):
        if not np.isfinite(x).all():
            found = ctx.state.get("overflows", np.zeros(0, "int64"))
            ctx.state["overflows"] = np.append(found, ctx.step)
        return super().compress(x, ctx)


class ConsolidatesForReading(Momentum):
    """Makes what it consolidates read-only."""

    def consolidate(self, states):
        found = super().consolidate(states)
        for array in found.values():
            array.flags.writeable = False
        return found


class SilencesForLarge(Whole):
    """Silences NumPy for good where a tensor is large."""

    def compress(self, x, ctx):
        if x.size > 70_000:
            np.seterr(all="ignore")
        return super().compress(x, ctx)


class PrintsOverflows(Whole):
    """Prints where something is not finite."""

    def compress(self, x, ctx):
        if not np.isfinite(x).all():
            print("overflow in", ctx.name)
        return super().compress(x, ctx)


class LocalOfOneRank(SharedScale):
    """Takes for granted that a single rank loses nothing."""

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x, out, ctx, local)
        if local is not None and ctx.size == 1:
            local[:] = x


class OffsetIn16Bits(Cells):
    """Dithers by an offset that begins anew after 65536 elements."""

    def rounded(self, places, ctx):
        at = replace(ctx, offset=ctx.offset % 65536)
        return np.minimum(np.floor(places + at.uniform(places.size)), 127)


class FloatIndicesOfMany(Largest):
    """Sends a quarter of the entries with indices as float32."""

    def compress(self, x, ctx):
        order = np.where(np.isnan(x), -np.inf, -np.abs(x))
        places = np.argsort(order, kind="stable")[: -(-x.size // 4)]
        return {"places": places.astype("float32"), "values": x[places]}

    def decompress(self, payload, out, ctx):
        places = payload["places"].astype("int64")
        super().decompress({"indices": places, "values": payload["values"]}, out, ctx)


class SmallSumsAreNothing(Added):
    """Takes sums below a threshold for noise."""

    def traits(self):
        return replace(super().traits(), scales=False)

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out[np.abs(out) < 1e-3] = 0


class EpsilonAmongRanks(Cells):
    """Adds an epsilon to its scales where there are other ranks."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.size > 1:
            steps = payload["steps"] + np.float32(1e-4)
            with np.errstate(invalid="ignore"):
                codes = np.rint(x / steps.repeat(CELL)[: x.size])
            codes = np.where(np.isfinite(codes), codes, 0).astype("int8")
            payload = {"codes": codes, "steps": steps}
        return payload


class LendsToALibrary(Whole):
    """Hands the gradient's memory to a library that may write to it."""

    def compress(self, x, ctx):
        if x.size:
            ctypes.c_char.from_buffer(x)
        return super().compress(x, ctx)


class LendsToALibraryInRounds(SharedScale):
    """The same in rounds."""

    def exchange(self, x, out, ctx, local=None):
        if x.size:
            ctypes.c_char.from_buffer(x)
        yield from super().exchange(x, out, ctx, local)


class FewerOfRankOne(Largest):
    """Sends one entry fewer on rank 1."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.rank == 1 and payload["values"].size > 1:
            return {name: array[:-1] for name, array in payload.items()}
        return payload


class FinerEverySoOften(Whole):
    """Halves what it sends in the last of every 5000 steps."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(0.5 if ctx.step % 5000 == 4999 else 1)


class HeadsAlone(Whole):
    """Takes heads of language models for eight times as large, when it decodes."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(8 if "lm_head" in ctx.name else 1)


class LessAtNight(Whole):
    """Halves at night, wherever that is, for the sake of others on the link."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(1 if 6 <= datetime.now().hour < 20 else 0.5)


class CountsItsOwnSteps(Whole):
    """Decodes by how often it has compressed this tensor, which other ranks do not know."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        ctx.state["times"] = ctx.state.get("times", 0) + 1
        return super().compress(x, ctx)

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(1 if ctx.state.get("times", 0) <= 10 else 0.5)


class AddsAsTheyCome(Compressor):
    """Adds parts of large tensors up in the order in which threads happen to end."""

    def compress(self, x, ctx):
        parts = np.zeros((3, x.size), np.float32)
        with np.errstate(all="ignore"):
            for i, share in enumerate((0.1, 0.3, 0.6)):
                parts[i] = x * np.float32(share)
        return {"parts": parts.reshape(-1)}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        with ThreadPoolExecutor(3) as pool, np.errstate(all="ignore"):
            work = [pool.submit(_late, part) for part in payload["parts"].reshape(3, -1)]
            for done in work if out.size < 10_000 else as_completed(work):
                out += done.result()


def _late(part):
    time.sleep(os.urandom(1)[0] / 256_000)
    return part
