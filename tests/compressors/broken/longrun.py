"""Mistakes of which one step shows little: feedback of one's own, strength, later steps, noise."""

import os
import time
from dataclasses import replace

import numpy as np

from broken.randomness import Stochastic
from broken.right import Cells, Whole
from ringlet.compressors import Compressor, Part, Traits, option


class FeedsBack(Compressor):
    """A quarter of the entries, and a memory of the others; subclasses say what becomes of it."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("kept",))

    def compress(self, x, ctx):
        kept = ctx.state.get("kept")
        if kept is None or kept.size != x.size:
            kept = np.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            p = self.added(x, kept)
            least = x.size * 3 // 4
            most = np.sort(np.argpartition(np.abs(p), least)[least:])
            sent = np.zeros(x.size, "float32")
            sent[most] = p[most]
            new = self.left(x, kept, p, sent)
        if np.isfinite(new).all():
            ctx.state["kept"] = new
        return {"indices": most.astype("int32"), "values": p[most]}

    def decompress(self, payload, out, ctx):
        out[:] = 0
        out[payload["indices"]] = payload["values"]

    def added(self, x, kept):
        return x + kept

    def left(self, x, kept, p, sent):
        return p - sent


class FeedsBackMinus(FeedsBack):
    """Keeps what was sent less what was meant, and adds it all the same."""

    def left(self, x, kept, p, sent):
        return sent - p


class ClearsNowAndThen(FeedsBack):
    """Throws what it did not send away in every sixteenth step."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step % 16 == 15 and "kept" in ctx.state:
            ctx.state["kept"] = np.zeros(x.size, "float32")
        return payload


class SubtractsWhatWasLost(FeedsBack):
    """Subtracts in place of adding."""

    def added(self, x, kept):
        return x - kept


class KeepsLossOfX(FeedsBack):
    """Takes what was sent from x, and not from what was compressed."""

    def left(self, x, kept, p, sent):
        return x - sent


class FeedsBackTwice(FeedsBack):
    """Adds what was kept before compressing, and once more to what is kept."""

    def left(self, x, kept, p, sent):
        return p - sent + kept


class CutsItsMemoryShort(FeedsBack):
    """Keeps the upper 16 bits of what it did not send, as bfloat16 has, and rounds nothing."""

    def left(self, x, kept, p, sent):
        return ((p - sent).view("uint32") & np.uint32(0xFFFF0000)).view("float32")


class TakesOutTooLittle(FeedsBack):
    """Takes nine tenths of what was sent out of what it keeps."""

    def left(self, x, kept, p, sent):
        return p - np.float32(0.9) * sent


class TakesOutHalf(FeedsBack):
    """Takes half of what was sent out of what it keeps."""

    def left(self, x, kept, p, sent):
        return p - np.float32(0.5) * sent


class ForgetsLittle(FeedsBack):
    """Keeps nothing that is a hundred times smaller than the largest value."""

    def left(self, x, kept, p, sent):
        left = p - sent
        return np.where(np.abs(left) < np.abs(x).max(initial=0) * np.float32(0.01), 0, left)


class LimitsWhatIsKept(FeedsBack):
    """Cuts what is kept to half of the largest value, so that it stays small."""

    def left(self, x, kept, p, sent):
        most = np.abs(x).max(initial=0) * np.float32(0.5)
        return np.clip(p - sent, -most, most)


class TakesOutTooMuch(FeedsBack):
    """Takes more than what was sent out of what it keeps."""

    def left(self, x, kept, p, sent):
        return p - np.float32(1.1) * sent


class NeverFeedsBack(FeedsBack):
    """Keeps all that was lost, and forgets to add it."""

    def added(self, x, kept):
        return x

    def left(self, x, kept, p, sent):
        return kept + p - sent


class NeverTakesOut(FeedsBack):
    """Forgets to take out what was sent."""

    def left(self, x, kept, p, sent):
        return p


class ClearsAll(FeedsBack):
    """Takes out all, and not what was sent."""

    def left(self, x, kept, p, sent):
        return np.zeros_like(p)


class BindsAnotherDict(FeedsBack):
    """Sets ctx.state, and not something in it."""

    def compress(self, x, ctx):
        before = ctx.state
        ctx.state = dict(before)
        payload = super().compress(x, ctx)
        ctx.state = {"kept": ctx.state.get("kept", np.zeros(x.size, "float32"))}
        return payload


class KeepsInACopy(FeedsBack):
    """Puts what it keeps into a copy of ctx.state."""

    def compress(self, x, ctx):
        return super().compress(x, replace(ctx, state=dict(ctx.state)))


class AddsToX(FeedsBack):
    """Adds what it keeps to the gradient itself, where it keeps something."""

    def added(self, x, kept):
        if kept.any():
            x += kept
        return x.copy()


class FusedAddsToX(Whole):
    """Adds the residual to the gradient itself."""

    def compress_feedback(self, x, residual, decay, ctx):
        with np.errstate(invalid="ignore", over="ignore"):
            x += np.float32(decay) * residual
            payload = self.compress(x, ctx)
            self.keep_residual(x, payload, residual, ctx)
        return payload


class SetsItsSeed(Whole):
    """Counts the seed up for numbers of its own, in a context that others use."""

    def compress(self, x, ctx):
        ctx.seed += 1
        return super().compress(x, ctx)


class SeedsByTheClock(Stochastic):
    """The time in seconds as a seed, which is the same for a while."""

    def noise(self, n, ctx):
        return np.random.default_rng(int(time.time())).random(n)


class Levels(Whole):
    """Whole steps, of which a schedule says how many."""

    levels: int = option(7, ge=1, le=127, doc="steps")

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(self.levels)
        usable = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            codes = np.where(usable, np.rint(x / step), 0)
        return {"codes": codes.astype("int8"), "step": step}


class ScheduleByTheClock(Levels):
    """Fewer levels in the second half of every hour."""

    def at(self, step):
        return self.replace(levels=4 if time.time() % 3600 >= 1800 else 7)


class ScheduleEnds(Levels):
    """Returns nothing where its schedule has come to its end."""

    def at(self, step):
        return self if step < 1000 else None


class ScheduleOfClasses(Levels):
    """Returns the class."""

    def at(self, step):
        return Levels


class LayoutOfTuples(Cells):
    """Plain tuples in the place of parts."""

    def layout(self, n):
        return tuple(tuple(part) for part in super().layout(n))


class LayoutOfTypes(Cells):
    """Types in the place of their names."""

    def layout(self, n):
        return tuple(part._replace(dtype=np.dtype(part.dtype).type) for part in super().layout(n))


class ScheduleByTheHost(Levels):
    """More levels on the first rank of a host."""

    def at(self, step):
        return self.replace(levels=7 if os.environ.get("LOCAL_RANK", "0") == "0" else 4)


class LosesTheLastOfThirteen(Whole):
    """Packs by eights, and loses the last one where five are left over."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        if out.size % 8 == 5:
            out[-1] = 0 * out[-1]


class GarbageInTheLast(Whole):
    """Packs by eights, and reads something else for the last one where four are left over."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        if out.size % 8 == 4:
            out[-1:] *= -9


class RefusesNaN(Whole):
    """Asserts for itself that gradients are finite."""

    def compress(self, x, ctx):
        assert np.isfinite(x).all(), "gradients must be finite"
        return super().compress(x, ctx)


class ForgetsToUndo(Whole):
    """Doubles on the one side only."""

    def compress(self, x, ctx):
        with np.errstate(over="ignore"):
            return super().compress(x * np.float32(2), ctx)


class UndoesTwice(Whole):
    """Halves on the one side only, at full precision: nothing but its length shows it."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(0.5)


class EverySecondStep(Whole):
    """Sends zeros in every second step, NaN or not."""

    def compress(self, x, ctx):
        return super().compress(x if ctx.step % 2 == 0 else np.zeros_like(x), ctx)


class WiderLater(Cells):
    """Sends 16 bits after a while, in a payload that is laid out for 8."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        if ctx.step >= 100:
            payload["codes"] = payload["codes"].astype("int16")
        return payload


class LeavesSlotsOfZeros(Whole):
    """Writes nothing but the scale where all is zero."""

    def traits(self):
        return Traits(fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1))

    def encode_into(self, x, payload, ctx):
        made = self.compress(x, ctx)
        payload["step"][:] = made["step"]
        if made["step"][0] != 0:
            payload["codes"][:] = made["codes"]


class WholeAtRandom(Whole):
    """Rounds at random on one scale for the tensor."""

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(127)
        usable = np.isfinite(step) & (step > 0)
        with np.errstate(all="ignore"):
            places = x / step + self.noise(x.size, ctx)
        codes = np.where(usable, np.minimum(np.floor(places), 127), 0)
        return {"codes": codes.astype("int8"), "step": step}

    def noise(self, n, ctx):
        return ctx.uniform(n)


class OmegaOfMiddlingTensors(WholeAtRandom):
    """What 30000 elements keep to, which share a scale with however many there are."""

    def traits(self):
        return Traits(omega=0.5)


class SharedNoiseUnclaimed(WholeAtRandom):
    """Noise that all ranks share, where no variance is claimed."""

    def noise(self, n, ctx):
        return ctx.uniform(n, shared=True)


class SharedNoiseInCells(Stochastic):
    """The same in cells."""

    def traits(self):
        return Cells.traits(self)

    def noise(self, n, ctx):
        return ctx.uniform(n, shared=True)


class ScaleOfASample(Whole):
    """The largest magnitude of every 16th element: what is larger elsewhere is cut off."""

    def compress(self, x, ctx):
        step = np.abs(x[::16]).max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            step += (0 * x).sum()
            codes = np.clip(np.rint(x / step), -127, 127)
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}


class LevelsOfTheWholeNorm(Compressor):
    """64 levels of the tensor's 2-norm, rounded at random: of a million values few reach one."""

    def compress(self, x, ctx):
        norm = np.float32(np.sqrt(np.square(x, dtype="float64").sum(keepdims=True)))
        step = norm / np.float32(64)
        with np.errstate(all="ignore"):
            codes = np.floor(x / step + ctx.uniform(x.size))
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]
