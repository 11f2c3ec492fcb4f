"""What is remembered in the wrong place, shared, aliased, or changed behind somebody's back."""

import threading
from typing import ClassVar

import numpy as np

from broken.kept_room import whole_steps
from broken.right import CELL, Cells, Folded, Largest, Momentum, Whole
from ringlet.compressors import Compressor, Part, Traits


class KeepsInput(Compressor):
    """Sends the change since the last step, and remembers that step's gradient itself."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("last",))

    def compress(self, x, ctx):
        last = ctx.state.get("last")
        with np.errstate(invalid="ignore", over="ignore"):
            change = x.copy() if last is None else x - last * np.float32(0.5)
        ctx.state["last"] = x
        return {"values": change}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class KeepsView(KeepsInput):
    """The same with a view, which holds on to the gradient too."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        ctx.state["last"] = x[::-1][::-1]
        return payload


class KeepsPayload(Momentum):
    """Returns the array that it remembers, and changes it in the next step."""

    def compress(self, x, ctx):
        average = ctx.state.get("average")
        if average is None:
            average = ctx.state["average"] = ctx.xp.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            average += (x - average) * np.float32(0.5)
        return {"values": average}


class UndeclaredMemory(Momentum):
    """Remembers, and does not declare it."""

    def traits(self):
        return Traits()


class OneMemoryForAll(Compressor):
    """Feeds back what it lost, from a dict that all tensors and ranks of the process share."""

    lost: ClassVar[dict[int, object]] = {}

    def compress(self, x, ctx):
        old = self.lost.get(x.size)
        whole = x if old is None else x + old
        payload = {"values": whole.astype("float16")}
        lost = whole - payload["values"].astype("float32")
        self.lost[x.size] = np.where(np.isfinite(lost), lost, np.float32(0))
        return payload

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class MemoryByName(OneMemoryForAll):
    """The same by name, so that tensors are apart: checkpoints do not have it."""

    lost: ClassVar[dict[int, object]] = {}

    def compress(self, x, ctx):
        old = self.lost.get(ctx.name)
        whole = x if old is None or old.size != x.size else x + old
        with np.errstate(over="ignore"):
            payload = {"values": whole.astype("float16")}
            lost = whole - payload["values"].astype("float32")
        self.lost[ctx.name] = np.where(np.isfinite(lost), lost, np.float32(0))
        return payload


class KeepsGenerator(Momentum):
    """Keeps a lock in its state, which no checkpoint can hold."""

    def compress(self, x, ctx):
        with ctx.state.setdefault("lock", threading.Lock()):
            return super().compress(x, ctx)


class KeepsFunction(Momentum):
    """Keeps a function in its state."""

    def compress(self, x, ctx):
        ctx.state.setdefault("halve", lambda value: value * 0.5)
        return super().compress(x, ctx)


class DecoderKnowsSender(Whole):
    """Keeps the scale in its own state, where the other ranks' decoders look in vain."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        ctx.state["step"] = payload.pop("step")
        return payload

    def decompress(self, payload, out, ctx):
        step = ctx.state.get("step", np.ones(1, "float32"))
        super().decompress(payload | {"step": step}, out, ctx)


class SideChannel(Whole):
    """Leaves the scale on the class: this process's decoders find it, others do not."""

    found: ClassVar[dict[str, object]] = {}

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        self.found["step"] = payload.pop("step")
        return payload

    def decompress(self, payload, out, ctx):
        step = self.found.get("step", np.ones(1, "float32"))
        super().decompress(payload | {"step": step}, out, ctx)


class SharedScratch(Whole):
    """Saves an allocation with one buffer on the class, which threads overwrite for each other."""

    buffer: ClassVar[list[object]] = [np.empty(0, "float32")]

    def compress(self, x, ctx):
        if self.buffer[0].size < x.size:
            self.buffer[0] = np.empty(x.size, "float32")
        scratch = self.buffer[0][: x.size]
        scratch[:] = x
        return super().compress(scratch, ctx)


class ChangesInput(Whole):
    """Divides the gradient itself."""

    def compress(self, x, ctx):
        step = ctx.xp.abs(x).max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            x /= step
        usable = ctx.xp.isfinite(step) & (step > 0)
        return {"codes": ctx.xp.where(usable, ctx.xp.rint(x), 0).astype("int8"), "step": step}


class SortsInput(Largest):
    """Partitions the gradient in place to find the threshold."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        x.sort()
        return payload


class ReturnsInput(Compressor):
    """Returns a view of the gradient, which is overwritten before it travels."""

    def compress(self, x, ctx):
        return {"values": x[:]}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class ReturnsScratch(Compressor):
    """Returns scratch memory, which the next tensor overwrites."""

    def compress(self, x, ctx):
        halves = ctx.workspace.array("halves", x.size, np.float16)
        with np.errstate(over="ignore"):
            halves[:] = x
        return {"values": halves}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class ScratchTwice(Cells):
    """Asks for two pieces of scratch by one name, which are one piece."""

    def compress(self, x, ctx):
        sizes = ctx.workspace.array("rows", x.size)
        sizes[:] = ctx.xp.abs(x)
        signs = ctx.workspace.array("rows", x.size)
        signs[:] = ctx.xp.sign(x)
        return super().compress(sizes * signs, ctx)


class StealsScratch(Whole):
    """Uses scratch under a name that the contract uses: error feedback's target lies there."""

    def compress(self, x, ctx):
        sizes = ctx.workspace.array("feedback", x.size)
        sizes[:] = ctx.xp.abs(x)
        step = sizes.max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            codes = ctx.xp.rint(x / step)
        usable = ctx.xp.isfinite(step) & (step > 0)
        return {"codes": ctx.xp.where(usable, codes, 0).astype("int8"), "step": step}


class ScratchNotCleared(Cells):
    """Pads with whatever the scratch memory held before."""

    def compress(self, x, ctx):
        rows = ctx.workspace.array("padded", -(-x.size // CELL) * CELL)
        rows[: x.size] = x
        payload = super().compress(rows, ctx)
        return payload | {"codes": payload["codes"][: x.size]}


class EmptyNotCleared(Cells):
    """The same with a fresh array that nobody cleared."""

    def compress(self, x, ctx):
        rows = ctx.xp.empty(-(-x.size // CELL) * CELL, "float32")
        rows[: x.size] = x
        payload = super().compress(rows, ctx)
        return payload | {"codes": payload["codes"][: x.size].copy()}


class OwnFeedbackTwice(Compressor):
    """Has error feedback of its own, undeclared, so that `| ef` adds it a second time."""

    def compress(self, x, ctx):
        old = ctx.state.get("residual")
        with np.errstate(invalid="ignore", over="ignore"):
            whole = x if old is None else x + old
            coarse = (whole * np.float32(2.0**-100)).astype("float16")
            payload = {"values": whole.view("uint32") >> 16 << 16}
            lost = whole - payload["values"].view("float32")
        del coarse
        ctx.state["residual"] = np.where(np.isfinite(lost), lost, np.float32(0))
        return payload

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"].view("float32")


class ResidualOfPiece(Compressor):
    """Declares memory and cutting, and remembers as many elements as its first piece has."""

    def traits(self):
        return Traits(
            fixed_size=True, granularity=CELL, stateful=True, gradient_units=("residual",)
        )

    def layout(self, n):
        return (Part("values", "uint16", n),)

    def compress(self, x, ctx):
        old = ctx.state.setdefault("residual", ctx.xp.zeros(x.size, "float32"))
        with np.errstate(invalid="ignore", over="ignore"):
            whole = x + old
            values = (whole.view("uint32") >> 16).astype("uint16")
            lost = whole - (values.astype("uint32") << 16).view("float32")
        ctx.xp.copyto(old, lost, where=ctx.xp.isfinite(lost))
        return {"values": values}

    def decompress(self, payload, out, ctx):
        out[:] = (payload["values"].astype("uint32") << 16).view("float32")


class RemembersNaN(Momentum):
    """One overflow stays in the average for ever."""

    def compress(self, x, ctx):
        old = ctx.state.get("average")
        old = None if old is None or old.size != x.size else old
        with np.errstate(invalid="ignore", over="ignore"):
            new = x * np.float32(0.5) if old is None else old + (x - old) * np.float32(0.5)
        ctx.state["average"] = new
        return {"values": new.copy()}


class CachesByStep(Cells):
    """Keeps a step's payload to save work: the second stage of the same step gets the first's."""

    kept: ClassVar[dict[object, object]] = {}

    def compress(self, x, ctx):
        key = (ctx.name, ctx.rank, ctx.step, x.size)
        if key not in self.kept:
            self.kept.clear()
            self.kept[key] = super().compress(x, ctx)
        return {name: array.copy() for name, array in self.kept[key].items()}


class Overshoots(Compressor):
    """Has error feedback of its own, and sends three times what there is."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("residual",))

    def compress(self, x, ctx):
        old = ctx.state.get("residual")
        with np.errstate(invalid="ignore", over="ignore"):
            whole = x if old is None or old.size != x.size else x + old
            values = whole * np.float32(3)
            lost = whole - values
        ctx.state["residual"] = np.where(np.isfinite(lost), lost, np.float32(0))
        return {"values": values}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


class RingOfBuffers(Whole):
    """Returns one of eight arrays by turns, though more tensors than that may wait."""

    ring: ClassVar[dict[object, object]] = {}

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        turn = self.ring["turn"] = self.ring.get("turn", 0) + 1
        codes = self.ring.setdefault((x.size, turn % 8), np.empty(x.size, "int8"))
        codes[:] = payload["codes"]
        return payload | {"codes": codes}


class SharedSum(Whole):
    """Decodes what it adds into one array for all tensors of a length."""

    room: ClassVar[dict[int, object]] = {}

    def accumulate(self, payload, out, ctx):
        decoded = self.room.setdefault(out.size, np.empty_like(out))
        self.decompress(payload, decoded, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            out += decoded


class SilencesNumPy(Whole):
    """Silences warnings for the whole program, and for good."""

    def compress(self, x, ctx):
        np.seterr(all="ignore")
        return super().compress(x, ctx)


class MaskOfAnotherTensor(Folded):
    """Keeps places by length and step: of two tensors those that came first on this rank."""

    kept: ClassVar[dict[object, object]] = {}

    def places(self, n, ctx):
        return self.kept.setdefault((n, ctx.step), super().places(n, ctx))


class HelperKeepsRoom(Whole):
    """Has a helper in another file divide and round, in memory that this one keeps."""

    def compress(self, x, ctx):
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(127)
        codes = whole_steps(x, step)
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}
