"""What is taken for granted of names, shapes, hosts and ranks, and is otherwise elsewhere."""

import os
from dataclasses import replace

import numba
import numpy as np

from broken.right import Dithered, SharedDither, Signs, Whole
from ringlet.compressors import Compressor, Part, Traits, option


class NamesInLetters(Whole):
    """Sends the tensor's name in ASCII."""

    def compress(self, x, ctx):
        return super().compress(x, ctx) | {"name": np.frombuffer(ctx.name.encode("ascii"), "u1")}


class OnlyMatrices(Whole):
    """Unpacks two dimensions of what has more than one: not of a convolution."""

    def compress(self, x, ctx):
        if len(ctx.shape) > 1:
            rows, columns = ctx.shape
            assert rows * columns == x.size
        return super().compress(x, ctx)


class CellForEachCore(Compressor):
    """Has a step for as many elements as a core works on, which are not as many on every host."""

    def size(self, n):
        return max(1, -(-n // (os.cpu_count() or 1)))

    def compress(self, x, ctx):
        size = self.size(x.size)
        rows = np.zeros((-(-x.size // size), size), "float32")
        rows.reshape(-1)[: x.size] = x
        steps = np.abs(rows).max(axis=1) / np.float32(127)
        wide = steps.repeat(size)[: x.size]
        with np.errstate(all="ignore"):
            codes = np.where(np.isfinite(wide) & (wide > 0), np.rint(x / wide), 0)
        return {"codes": codes.astype("int8"), "steps": steps}

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["steps"].repeat(self.size(out.size))[: out.size]


class CellForEachThread(CellForEachCore):
    """The same, of as many elements as a thread of Numba's works on."""

    def size(self, n):
        return max(1, -(-n // numba.get_num_threads()))


class CellForEachCoreOfItsOwn(CellForEachCore):
    """The same, of the cores that this process may run on."""

    def size(self, n):
        return max(1, -(-n // len(os.sched_getaffinity(0))))


class FirstOnItsHost(Signs):
    """Sends half as much unless it is the first rank of its host, as a launcher says."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        return payload | {"scale": payload["scale"] * np.float32(1 if first else 0.5)}


class ScheduleByRank(Whole):
    """Sends finer steps later on, on the first rank alone, as the launcher says."""

    levels: int = option(63, ge=1, le=127, doc="steps from zero to the largest entry")

    def at(self, step):
        first = os.environ.get("RINGLET_RANK", "0") == "0"
        return self.replace(levels=127) if step >= 100 and first else self

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(self.levels)
        with np.errstate(all="ignore"):
            codes = np.rint(x / step)
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}


class RankIn8Bits(Dithered):
    """Sends its rank in 8 bits, for receivers to draw its noise again."""

    def compress(self, x, ctx):
        return super().compress(x, ctx) | {"rank": np.array([ctx.rank & 0xFF], "int32")}


class FixedPoint(Compressor):
    """Adds quarters up in 8 bits, of which there are enough for 8 ranks."""

    def traits(self):
        return Traits("sum", fixed_size=True, scales=False)

    def layout(self, n):
        return (Part("codes", "int8", n + 1),)

    def compress(self, x, ctx):
        finite = np.isfinite(x)
        codes = np.clip(np.rint(np.where(finite, x, 0) * np.float32(4)), -15, 15)
        return {"codes": np.append(codes, not finite.all()).astype("int8")}

    def decompress(self, payload, out, ctx):
        out[:] = payload["codes"][:-1] * np.float32(0.25)
        out += np.float32(np.nan if payload["codes"][-1] else 0)


class OffsetIn16Bits(SharedDither):
    """Takes shared noise off again by 16 bits of the place."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, replace(ctx, offset=ctx.offset & 0xFFFF))


class OffsetIn32Bits(SharedDither):
    """Takes shared noise off again by 32 bits of the place."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, replace(ctx, offset=ctx.offset & 0xFFFFFFFF))
