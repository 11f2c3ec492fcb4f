"""What was handed for a call alone, and is kept: the next call finds something else in it."""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from broken.right import Added, Cells, Momentum, SharedScale, Whole
from ringlet.compressors import Compressor, Part, Round, Traits, remembered


class KeepsSlots(Cells):
    """Adds a 16th of the last codes to the next ones, and keeps the array that it was to fill."""

    def traits(self):
        return Traits(fixed_size=True, stateful=True)

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        last = ctx.state.get("codes")
        if last is not None and last.size == x.size:
            codes = payload["codes"] + last.astype("int16") // 16
            payload["codes"] = np.clip(codes, -127, 127).astype("int8")
        ctx.state["codes"] = payload["codes"].copy()
        return payload

    def encode_into(self, x, payload, ctx):
        super().encode_into(x, payload, ctx)
        ctx.state["codes"] = payload["codes"]


class KeepsScaleSlot(Compressor):
    """Halves how fast its scale may fall, and keeps a view of the slot that the scale is in."""

    def traits(self):
        return Traits(fixed_size=True, stateful=True, gradient_units=("step",))

    def units_size(self, name, n):
        return 1

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1))

    def compress(self, x, ctx):
        with np.errstate(all="ignore"):
            step = np.abs(x).max(initial=0, keepdims=True) / np.float32(127)
            held = ctx.state.get("step")
            if held is not None and np.isfinite(step).all():
                step = np.maximum(step, np.asarray(held, "float32").reshape(1) / 2)
            codes = np.where(step > 0, x / np.where(step > 0, step, 1), 0)
        if np.isfinite(step).all():
            ctx.state["step"] = step.copy()
        else:
            codes = np.zeros_like(x)
        return {"codes": np.rint(codes).astype("int8"), "step": step}

    def encode_into(self, x, payload, ctx):
        super().encode_into(x, payload, ctx)
        if np.isfinite(payload["step"]).all():
            ctx.state["step"] = payload["step"][:]

    def decompress(self, payload, out, ctx):
        with np.errstate(invalid="ignore"):
            out[:] = payload["codes"] * payload["step"]


class KeepsWhatItDecodes(Added):
    """Smooths what it receives, and keeps the array that it was to decode."""

    def traits(self):
        return replace(super().traits(), stateful=True)

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        ctx.state["received"] = payload["values"]

    def finish(self, out, ctx):
        last = ctx.state.get("last")
        if last is not None and last.size == out.size and np.isfinite(last).all():
            out += np.float32(0.1) * last
        ctx.state["last"] = ctx.state["received"]


class KeepsLocal(SharedScale):
    """Remembers what it sent last, in the array of error feedback."""

    def traits(self):
        return Traits("rounds", stateful=True)

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x, out, ctx, local)
        if local is not None:
            ctx.state["sent"] = local


class KeepsOutForItself(Momentum):
    """Keeps what it decoded into for the next step, on its own side alone."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        ctx.state["decoded"] = out[:]


class KeepsFinished(Cells):
    """Follows the mean of all ranks, and keeps the array of the result."""

    def traits(self):
        return Traits(fixed_size=True, stateful=True, gradient_units=("mean",))

    def finish(self, out, ctx):
        held = ctx.state.get("mean")
        with np.errstate(invalid="ignore"):
            if held is not None and held.size == out.size:
                out[:] = np.float32(0.9) * out + np.float32(0.1) * held
        if np.isfinite(out).all():
            ctx.state["mean"] = out.reshape(-1)


class KeepsReceived(Compressor):
    """Sends what the gradient lacks of the last mean, and keeps the array that it received."""

    def traits(self):
        return Traits("rounds", stateful=True, gradient_units=("last",))

    def chained_part(self):
        return None

    def regrouped(self, state):
        return {}

    def exchange(self, x, out, ctx, local=None):
        last = remembered("last", x.size, ctx).copy()
        with np.errstate(invalid="ignore", over="ignore"):
            mean = yield Round(x - last, "mean")
            mean += last
        out[:] = mean
        if local is not None:
            local[:] = x
        if np.isfinite(mean).all():
            ctx.state["last"] = mean


class KeepsReceivedScale(SharedScale):
    """Smooths the scale that all ranks share, and keeps the array that it received."""

    def traits(self):
        return Traits("rounds", stateful=True, gradient_units=("most",))

    def units_size(self, name, n):
        return 1

    def regrouped(self, state):
        return {}

    def exchange(self, x, out, ctx, local=None):
        largest = np.abs(x).max(initial=0, keepdims=True)
        largest = np.where(np.isnan(largest), np.float32(np.inf), largest)
        received = yield Round(largest, "max")
        most = np.maximum(received, np.asarray(ctx.state.get("most", 0), "float32") / 2)
        if np.isfinite(received).all():
            ctx.state["most"] = received
        with np.errstate(all="ignore"):
            step = most / np.float32(1000)
            usable = np.isfinite(step) & (step > 0)
            codes = np.where(usable, np.rint(x / step), 0).astype("int32")
            total = yield Round(codes, "sum")
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class KeepsHeld(Momentum):
    """Keeps memory that it was lent until the end of a block."""

    def compress(self, x, ctx):
        old = remembered("average", x.size, ctx)
        with ctx.workspace.held(x.size) as room, np.errstate(invalid="ignore", over="ignore"):
            new = old + (x - old) * np.float32(0.5)
            room[:] = np.where(np.isfinite(new), new, old)
            ctx.state["average"] = room
        return {"values": new}


class SendsHeld(Whole):
    """Returns codes in memory that was lent until the end of a block."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        with ctx.workspace.held(x.size, "int8") as codes:
            codes[:] = payload["codes"]
            return payload | {"codes": codes}


class YieldsHeldTooLate(Compressor):
    """Yields memory that it has given back already."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        with ctx.workspace.held(x.size) as values:
            values[:] = x
        out[:] = yield Round(values, "mean")
        if local is not None:
            local[:] = x


class ChangesWhatItReceived(SharedScale):
    """Keeps the step of the first round as a view of what it received."""

    def exchange(self, x, out, ctx, local=None):
        largest = np.abs(x).max(initial=0, keepdims=True)
        largest = np.where(np.isnan(largest), np.float32(np.inf), largest)
        step = yield Round(largest, "max")
        step /= np.float32(1000)
        with np.errstate(all="ignore"):
            usable = np.isfinite(step) & (step > 0)
            codes = np.where(usable, np.rint(x / step), 0).astype("int32")
            total = yield Round(codes, "sum")
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class KeepsResidual(Cells):
    """Keeps the residual of error feedback, to look at its size in the next step."""

    def traits(self):
        return Traits(fixed_size=True, stateful=True)

    def feedback_into(self, x, residual, decay, payload, ctx):
        super().feedback_into(x, residual, decay, payload, ctx)
        ctx.state["lacked"] = residual


class KeepsContext(Cells):
    """Keeps the context of the last call on the class, to look up its noise when it decodes."""

    last: ClassVar[dict[str, object]] = {}

    def rounded(self, places, ctx):
        self.last[ctx.name] = ctx
        return ctx.xp.rint(places)


class LeavesANote(Cells):
    """Leaves its noise at the context, for nobody."""

    def rounded(self, places, ctx):
        ctx.noise = ctx.uniform(places.size)
        return ctx.xp.rint(places)
