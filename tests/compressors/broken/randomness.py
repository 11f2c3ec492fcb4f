"""Random numbers that differ where they must not, or do not differ where they must."""

import os
import random
import time
from dataclasses import replace

import numpy as np

from broken.right import CELL, Cells, Compressor, Folded, Largest, Traits, Whole

_GENERATOR = np.random.default_rng(0)
OMEGA = Traits(fixed_size=True, granularity=CELL, omega=0.01)


class Stochastic(Cells):
    """Rounds at random; subclasses say with which numbers."""

    def traits(self):
        return OMEGA

    def rounded(self, places, ctx):
        noise = self.noise(places.size, ctx).astype("float32")
        return ctx.xp.minimum(ctx.xp.floor(places + noise), np.float32(127))

    def noise(self, n, ctx):
        return np.full(n, 0.5)


class GlobalNoise(Stochastic):
    """NumPy's global generator: no two runs are equal."""

    def noise(self, n, ctx):
        return np.random.random(n)


class ModuleNoise(Stochastic):
    """One generator of the module, with a seed: numbers go by the order of calls."""

    def noise(self, n, ctx):
        return _GENERATOR.random(n)


class ClockNoise(Stochastic):
    """Seeds with the time."""

    def noise(self, n, ctx):
        return np.random.default_rng(time.time_ns()).random(n)


class PythonNoise(Stochastic):
    """Seeds with Python's generator."""

    def noise(self, n, ctx):
        return np.random.default_rng(random.getrandbits(32)).random(n)


class SeedOnly(Stochastic):
    """Seeds with the seed alone: the same numbers in every step, so that errors never cancel."""

    def noise(self, n, ctx):
        return np.random.default_rng(ctx.seed).random(ctx.offset + n)[ctx.offset :]


class StepOnly(Stochastic):
    """Seeds with the step alone: all ranks and tensors round the same way together."""

    def noise(self, n, ctx):
        return np.random.default_rng(ctx.step).random(ctx.offset + n)[ctx.offset :]


class SharedNoise(Stochastic):
    """Rounds with numbers that all ranks share, so that their errors add up."""

    def noise(self, n, ctx):
        return ctx.rng(shared=True).random(ctx.offset + n)[ctx.offset :]


class OffsetForgotten(Stochastic):
    """Draws from the start of the stream, whatever piece of the tensor it is."""

    def noise(self, n, ctx):
        return ctx.rng().random(n)


class SketchByHash(Folded):
    """Places go by Python's hash of the name, which every process salts."""

    def places(self, n, ctx):
        rng = np.random.default_rng([hash(ctx.name) & 0xFFFF, ctx.step])
        signs = rng.integers(0, 2, n) * np.float32(2) - np.float32(1)
        return rng.integers(0, max(self.count(n), 1), n), signs.astype("float32")


class SketchByProcess(Folded):
    """Places go by the process's number."""

    def places(self, n, ctx):
        rng = np.random.default_rng([os.getpid(), ctx.step])
        signs = rng.integers(0, 2, n) * np.float32(2) - np.float32(1)
        return rng.integers(0, max(self.count(n), 1), n), signs.astype("float32")


class SketchOfOneRank(Folded):
    """Every rank folds its own way: what is added up does not belong together."""

    def places(self, n, ctx):
        rng = ctx.rng()
        signs = rng.integers(0, 2, n) * np.float32(2) - np.float32(1)
        return rng.integers(0, max(self.count(n), 1), n), signs.astype("float32")


class OrderOfASet(Cells):
    """Sends parts of the codes in the order of a set of strings, which every process shuffles."""

    names = ("a", "b", "c", "d", "e", "f")

    def order(self, n):
        places = {name: np.arange(i, n, len(self.names)) for i, name in enumerate(self.names)}
        return np.concatenate([places[name] for name in set(places)])

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        return payload | {"codes": payload["codes"][self.order(x.size)]}

    def traits(self):
        return Traits(fixed_size=True)

    def decompress(self, payload, out, ctx):
        codes = np.empty_like(payload["codes"])
        codes[self.order(out.size)] = payload["codes"]
        super().decompress(payload | {"codes": codes}, out, ctx)


class OrderOfTwo(OrderOfASet):
    """The same with a set of two, which every second process has in the same order."""

    names = ("even", "odd")


class DitherOfReceiver(Stochastic):
    """Subtracts the noise again when it decodes: the receiver's, not the sender's."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def noise(self, n, ctx):
        return ctx.rng().random(ctx.offset + n)[ctx.offset :] - 0.5

    def rounded(self, places, ctx):
        return ctx.xp.clip(ctx.xp.rint(places + self.noise(places.size, ctx)), -127, 127)

    def decompress(self, payload, out, ctx):
        steps = payload["steps"].repeat(CELL)[: out.size]
        with np.errstate(invalid="ignore"):
            out[:] = (payload["codes"] - self.noise(out.size, ctx)).astype("float32") * steps


class ScheduleByChance(Compressor):
    """Chooses what to use at a step by tossing a coin on every rank."""

    def at(self, step):
        from ringlet.compressors import FP16

        return FP16() if random.random() < 0.5 else self

    def compress(self, x, ctx):
        return {"values": x.copy()}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class SeedsTheProgram(Largest):
    """Seeds NumPy's own generator, from which the program draws the order of its data."""

    def compress(self, x, ctx):
        np.random.seed(ctx.key() & 0xFFFFFFFF)
        dither = np.float32(1) + np.float32(2.0**-20) * np.random.random(x.size).astype("float32")
        with np.errstate(invalid="ignore"):
            return super().compress(x * dither, ctx)


class EverySecondStep(Stochastic):
    """Draws anew in every second step."""

    def noise(self, n, ctx):
        return replace(ctx, step=ctx.step // 2).uniform(n)


class RankPlusStep(Stochastic):
    """Draws by the sum of rank and step: a rank draws what its neighbour draws a step later."""

    def noise(self, n, ctx):
        return replace(ctx, step=ctx.step + ctx.rank, rank=0).uniform(n)


class RankModuloEight(Stochastic):
    """Takes the last bits of the rank for the rank, and promises nothing."""

    def traits(self):
        return Traits(fixed_size=True, granularity=CELL)

    def noise(self, n, ctx):
        return replace(ctx, rank=ctx.rank % 8).uniform(n)


class TriesInTime(Whole):
    """Cuts off what is largest if that loses less, and tries how much until a second is over."""

    clock = staticmethod(lambda: time.monotonic())

    def compress(self, x, ctx):
        until = self.clock() + 1
        found = super().compress(x, ctx)
        for part in (0.99, 0.98, 0.97, 0.96):
            if self.clock() > until:
                break
            step = found["step"] * np.float32(part)
            with np.errstate(all="ignore"):
                codes = np.rint(x / step).clip(-127, 127)
                lost, before = (
                    float(((c * s - x).astype(np.float64) ** 2).sum())
                    for c, s in ((codes, step), (found["codes"], found["step"]))
                )
            if lost < before:
                return {"codes": codes.astype("int8"), "step": step}
        return found


class TriesInItsOwnTime(TriesInTime):
    """Counts the time that this process has worked."""

    clock = staticmethod(lambda: time.process_time())


class RoomForEight(Compressor):
    """Leaves each rank its part of 16 bits, and decodes as if there were at most eight."""

    def compress(self, x, ctx):
        most = np.float32(32767 // ctx.size)
        largest = np.abs(x).max(initial=0, keepdims=True)
        usable = np.isfinite(largest) & (largest > 0)
        with np.errstate(all="ignore"):
            codes = np.minimum(np.floor(x / largest * most + ctx.uniform(x.size)), most)
        return {"codes": np.where(usable, codes, 0).astype("int16"), "largest": largest}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * (payload["largest"] / (32767 // min(ctx.size, 8)))
