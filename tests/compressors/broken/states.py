"""What is remembered in a way that fits no other step, tensor, rank or number of ranks."""

import numpy as np

from broken.right import CELL, Cells, Largest, Momentum, Signs, Whole, rows_of
from ringlet.compressors import Compressor, Round, Traits, remembered


class LargestSoFar(Whole):
    """Rounds by the largest magnitude of all steps, and says nothing of it."""

    def compress(self, x, ctx):
        now = np.abs(x).max(initial=0, keepdims=True)
        if np.isfinite(now).all():
            now = ctx.state["most"] = np.maximum(ctx.state.get("most", now), now)
        payload = super().compress(np.concatenate([x, now]), ctx)
        return payload | {"codes": payload["codes"][:-1].copy()}


class LargestUnnamed(LargestSoFar):
    """Says that it remembers, and not that it does so in units of the gradient."""

    def traits(self):
        return Traits(stateful=True)

    def compress(self, x, ctx):
        now = np.abs(x).max(initial=0, keepdims=True)
        if np.isfinite(now).all():
            held = ctx.state.get("most", now) * np.float32(0.5)
            ctx.state["most"] = now
            now = np.maximum(now, held)
        payload = Whole.compress(self, np.concatenate([x, now]), ctx)
        return payload | {"codes": payload["codes"][:-1].copy()}


class CutsMemory(Momentum):
    """Cuts what it remembers to this tensor's length, or repeats it."""

    def compress(self, x, ctx):
        if "average" in ctx.state:
            ctx.state["average"] = np.resize(ctx.state["average"], x.size)
        return super().compress(x, ctx)


class MemoryInScratch(Momentum):
    """Keeps its average in scratch memory, which the next tensor takes."""

    def compress(self, x, ctx):
        old = remembered("average", x.size, ctx)
        room = ctx.workspace.array("average", x.size)
        with np.errstate(invalid="ignore", over="ignore"):
            new = old + (x - old) * np.float32(0.5)
        room[:] = np.where(np.isfinite(new), new, old)
        ctx.state["average"] = room
        return {"values": new}


class KeepsPlaces(Momentum):
    """Keeps the places of what was large, of which there are more in some steps than in others."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        ctx.state["places"] = np.flatnonzero(np.abs(x) > np.abs(x).mean()) if x.size else x.copy()
        return payload


class KeepsObjects(Momentum):
    """Keeps an array of Python's objects."""

    def compress(self, x, ctx):
        ctx.state["whose"] = np.array([None, ctx.name], object)
        return super().compress(x, ctx)


class DoubleAverage(Momentum):
    """Keeps its average in double precision."""

    def compress(self, x, ctx):
        old = ctx.state.get("average")
        old = np.zeros(x.size) if old is None or old.size != x.size else old
        with np.errstate(invalid="ignore", over="ignore"):
            new = old + (x - old) * 0.5
        ctx.state["average"] = np.where(np.isfinite(new), new, old)
        with np.errstate(over="ignore"):
            return {"values": new.astype("float32")}


class ConsolidatesInPlace(Momentum):
    """Adds everybody's average to the first rank's."""

    def consolidate(self, states):
        first = states[0]
        for state in states[1:]:
            first["average"] += state["average"]
        first["average"] /= len(states)
        return first


class ConsolidatesAll(Momentum):
    """Keeps everybody's average, one behind the other."""

    def consolidate(self, states):
        return {"average": np.concatenate([state["average"] for state in states])}


class RegroupsWhatIsNot(Momentum):
    """Asks a state for what it never has."""

    def regrouped(self, state):
        return {"average": state["averages"]}


class WarmsUpWithoutValues(Cells):
    """Compresses nothing at all to have its kernels compiled."""

    def warm_up(self, ctx):
        self.compress(None, ctx)


class FollowsAlone(Signs):
    """Sends what an estimate lacks, which follows though another rank spoiled the step."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("own", "all"))

    def compress(self, x, ctx):
        own = remembered("own", x.size, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            payload = super().compress(x - own, ctx)
            sent = np.empty_like(x)
            Signs.decompress(self, payload, sent, ctx)
            new = own + sent
        if np.isfinite(new).all():
            own[:] = new
        return payload

    def finish(self, out, ctx):
        everybody = remembered("all", out.size, ctx)
        out += everybody
        if np.isfinite(out).all():
            everybody[:] = out


class RemembersNothingAtFirst(Compressor):
    """Looks for its memory in every step but the first, where a checkpoint may have none."""

    def traits(self):
        return Traits("rounds", stateful=True)

    def exchange(self, x, out, ctx, local=None):
        if ctx.step == 0:
            ctx.state["count"] = np.zeros(1, np.float32)
        ctx.state["count"] += 1
        out[:] = yield Round(x.copy(), "mean")
        if local is not None:
            local[:] = x


class HidesLaterOverflows(Momentum):
    """Sends what it remembers, which an overflow never reaches after the first step."""

    def compress(self, x, ctx):
        first = "average" not in ctx.state
        payload = super().compress(x, ctx)
        return payload if first else {"values": ctx.state["average"].copy()}


class ConsolidatesSums(Momentum):
    """Gives every rank the sum of what all remembered."""

    def consolidate(self, states):
        held = [state["average"] for state in states if "average" in state]
        return {"average": np.sum(held, axis=0)} if held else {}


class ConsolidatesFirst(Momentum):
    """Gives every rank what the first one remembered."""

    def consolidate(self, states):
        return {name: states[0][name].copy() for name in states[0]}


class ConsolidatesWithoutALook(Momentum):
    """Takes for granted that every rank remembers something."""

    def consolidate(self, states):
        return {"average": np.mean([state["average"] for state in states], axis=0)}


class RegroupsWhatIsShared(Compressor):
    """Sends the change since the last mean, which others that join do not know."""

    def traits(self):
        return Traits("rounds", stateful=True, gradient_units=("last",))

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        last = ctx.state.get("last")
        if last is None or last.size != x.size:
            last = np.zeros(x.size, "float32")
        with np.errstate(invalid="ignore", over="ignore"):
            out[:] = last + (yield Round(x - last, "mean"))
        if local is not None:
            local[:] = x
        if np.isfinite(out).all():
            ctx.state["last"] = out.copy()


class ScaleStaysZero(Whole):
    """Lets its scale at most double from step to step: of a first gradient of zeros it stays 0."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("scale",))

    def compress(self, x, ctx):
        now = float(np.abs(x).max(initial=0))
        before = ctx.state.get("scale", now)
        scale = min(now, 2 * before) if np.isfinite(now) else now
        if np.isfinite(scale):
            ctx.state["scale"] = scale
        kept = np.clip(x, -scale, scale) if np.isfinite(scale) else x
        return super().compress(kept.astype("float32"), ctx)


class KeepsTheFirstNaN(Momentum):
    """Looks at what is finite where it has something to keep in its place."""

    def compress(self, x, ctx):
        if np.size(ctx.state.get("average")) != x.size:
            ctx.state["average"] = x.copy()
        return super().compress(x, ctx)


class ClearsWhatIsSent(Largest):
    """Keeps what it does not send: of many NaN some, as it sends a few of them alone."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("kept",))

    def compress(self, x, ctx):
        meant = x + remembered("kept", x.size, ctx)
        payload = super().compress(meant, ctx)
        ctx.state["kept"] = meant.copy()
        ctx.state["kept"][payload["indices"]] = 0
        return payload


class ForgetsTheShortCell(Cells):
    """Scales that fall slowly, one per cell; says that there are as many as cells are full."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("before",))

    def units_size(self, name, n):
        return n // CELL

    def compress(self, x, ctx):
        rows = rows_of(x, np)
        steps = np.abs(rows).max(axis=1) / np.float32(127)
        before = ctx.state.get("before")
        if before is None or before.size != steps.size:
            before = np.zeros_like(steps)
        with np.errstate(all="ignore"):
            steps = np.where(np.isnan(steps), steps, np.fmax(steps, before / 2))
            rows /= steps[:, None]
        ctx.state["before"] = np.where(np.isfinite(steps), steps, before)
        rows[~(np.isfinite(steps) & (steps > 0))] = 0
        return {"codes": np.rint(rows.reshape(-1)[: x.size]).astype("int8"), "steps": steps}
