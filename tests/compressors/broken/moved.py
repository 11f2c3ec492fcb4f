"""Memory that is right until it is saved, scaled, averaged, or handed on to others."""

import numpy as np

from broken.right import CountsAlong, Largest, Momentum, SharedScale, Signs
from ringlet.compressors import Compressor, Round, Traits, remembered


class RefusesAFewMore(Momentum):
    """Consolidates two ranks' memories alone."""

    def consolidate(self, states):
        first, second = (state["average"] for state in states if state)
        return {"average": (first + second) / 2}


class ConsolidatesToDouble(Momentum):
    """Returns a mean in double precision."""

    def consolidate(self, states):
        held = [state["average"].astype("float64") for state in states if "average" in state]
        return {"average": np.sum(held, axis=0) / max(len(states), 1)} if held else {}


class ConsolidatesOnlyTheLast(Momentum):
    """Overwrites, rank by rank, what it means to add up."""

    def consolidate(self, states):
        total = {}
        for state in states:
            for name, value in state.items():
                total[name] = value / np.float32(len(states))
        return total


class ConsolidatesSelf(Momentum):
    """Hands on the array of a lone rank as it is, which two ranks then write to."""

    def consolidate(self, states):
        if len(states) == 1:
            return states[0]
        return super().consolidate(states)


class RegroupsHalf(Momentum):
    """Halves what it goes on with in place."""

    def regrouped(self, state):
        if "average" in state:
            state["average"] *= np.float32(0.5)
        return dict(state)


class AveragesInIntegers(Momentum):
    """Keeps 8 bits of its average and a scale, and names the codes as what is in units."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("codes",))

    def compress(self, x, ctx):
        codes, step = ctx.state.get("codes"), ctx.state.get("step")
        fits = codes is not None and step is not None and np.size(codes) == x.size
        old = codes * np.float32(step) if fits else np.zeros_like(x)
        with np.errstate(all="ignore"):
            new = old + (x - old) * np.float32(0.5)
            step = np.abs(new).max(initial=0) / np.float32(127)
            if np.isfinite(step):
                ctx.state["codes"] = np.rint(new / step if step else new).astype("int8")
                ctx.state["step"] = float(step)
        return {"values": new}


class KeepsMatrix(Momentum):
    """Remembers its average in the tensor's shape."""

    def compress(self, x, ctx):
        shape = ctx.shape if int(np.prod(ctx.shape)) == x.size else (x.size,)
        old = ctx.state.get("average")
        old = np.zeros(x.size, "f4") if old is None or old.size != x.size else old.reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            new = old + (x - old) * np.float32(0.5)
        ctx.state["average"] = np.where(np.isfinite(new), new, old).reshape(shape)
        return {"values": new}


class KeepsListOfArrays(Momentum):
    """Keeps the last two gradients in a list."""

    def compress(self, x, ctx):
        payload = super().compress(x, ctx)
        ctx.state["last"] = [x.copy(), x.copy()]
        return payload


class KeepsRecords(Momentum):
    """Keeps two numbers of a step as a record."""

    def compress(self, x, ctx):
        ctx.state["seen"] = np.zeros(1, [("step", "i8"), ("size", "i8")])
        return super().compress(x, ctx)


class KeepsDates(Momentum):
    """Keeps dates, in an array."""

    def compress(self, x, ctx):
        ctx.state["since"] = np.zeros(2, "datetime64[s]")
        return super().compress(x, ctx)


class KeepsTimeOfStep(Momentum):
    """Keeps a span of time, as a number of NumPy's."""

    def compress(self, x, ctx):
        ctx.state["took"] = np.timedelta64(3, "ms")
        return super().compress(x, ctx)


class KeepsWideNumbers(Momentum):
    """Keeps a sum in more than 64 bits."""

    def compress(self, x, ctx):
        ctx.state["sum"] = np.zeros(3, np.longdouble)
        return super().compress(x, ctx)


class KeepsHugeNumber(Momentum):
    """Keeps a hash of 128 bits."""

    def compress(self, x, ctx):
        ctx.state["hash"] = 1 << 100
        return super().compress(x, ctx)


class KeepsNumbersAsKeys(Momentum):
    """Keeps the norm of every part by its number."""

    def compress(self, x, ctx):
        ctx.state["norms"] = {0: float(np.isfinite(x).all())}
        return super().compress(x, ctx)


class WritesToLoaded(Momentum):
    """Sets the flags of what it keeps, so that nothing else writes to it."""

    def compress(self, x, ctx):
        old = ctx.state.get("average")
        old = np.zeros(x.size, "f4") if old is None or old.size != x.size else old
        with np.errstate(invalid="ignore", over="ignore"):
            new = old + (x - old) * np.float32(0.5)
        kept = ctx.state["average"] = np.where(np.isfinite(new), new, old)
        kept.flags.writeable = False
        return {"values": new}


class EmptiedInTheMiddle(SharedScale):
    """Expects in its second round what it kept before the first."""

    def traits(self):
        return Traits("rounds", stateful=True)

    def exchange(self, x, out, ctx, local=None):
        if ctx.step % 2 == 0:
            ctx.state["even"] = float(ctx.step)
        assert ctx.state["even"] <= ctx.step
        yield from super().exchange(x, out, ctx, local)


class OneResidualForAllRanks(Compressor):
    """Remembers what it lost of the mean, on every rank the same, and adds it on every rank."""

    def traits(self):
        return Traits("rounds", stateful=True, gradient_units=("lost",))

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        lost = remembered("lost", x.size, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            mean = (yield Round(x + lost, "mean")).copy()
            step = np.abs(mean).max(initial=0) / np.float32(7)
            out[:] = np.rint(mean / step) * step if step > 0 else mean
            left = mean - out
        if np.isfinite(left).all():
            lost[:] = left * np.float32(ctx.size)
        if local is not None:
            local[:] = x


class LostOnNewRanks(Signs):
    """Keeps a mean of signs in finish(), which ranks that join do not have, and regroups it."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("all",))

    def finish(self, out, ctx):
        kept = remembered("all", out.size, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            out += np.float32(0.1) * kept
        if np.isfinite(out).all():
            kept[:] = out


class ExpectsNamedArrays(Momentum):
    """Goes by a second array where it finds the first: consolidated, there is one of the two."""

    def compress(self, x, ctx):
        if "average" in ctx.state:
            ctx.state["age"] += 1
        else:
            ctx.state["age"] = np.zeros(1, "float32")
        return super().compress(x, ctx)


class UnitsOfNothing(Momentum):
    """Says that a name is in units of the gradient under which nothing is kept."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("averages",))


class SquaresInUnits(Momentum):
    """Keeps a mean of squares, which a loss scale multiplies twice."""

    def traits(self):
        return Traits(stateful=True, gradient_units=("average", "squares"))

    def compress(self, x, ctx):
        squares = remembered("squares", x.size, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            new = np.float32(0.5) * (squares + x * x)
        np.copyto(squares, new, where=np.isfinite(new))
        payload = super().compress(x, ctx)
        with np.errstate(all="ignore"):
            clipped = np.minimum(np.abs(payload["values"]), np.float32(3) * np.sqrt(new))
        return {"values": np.where(new > 0, np.copysign(clipped, x), payload["values"])}


class ConsolidatesNothing(Momentum):
    """Has nothing to go on with where ranks join or leave, though each of them owes something."""

    def consolidate(self, states):
        return {}


class KeepsByRank(Largest):
    """Has a memory for each rank, though ctx.state is one rank's already."""

    def traits(self):
        return Traits(stateful=True, gradient_units=tuple(f"kept{i}" for i in range(130)))

    def number(self, ctx):
        return ctx.rank

    def compress(self, x, ctx):
        name = f"kept{self.number(ctx) % 130}"
        meant = x + remembered(name, x.size, ctx)
        payload = super().compress(meant, ctx)
        if np.isfinite(meant).all():
            ctx.state[name] = meant.copy()
            ctx.state[name][payload["indices"]] = 0
        return payload


class KeepsBySize(KeepsByRank):
    """Has a memory for each number of ranks."""

    def number(self, ctx):
        return ctx.size


class LosesItsCount(CountsAlong):
    """Counts its steps in what nobody hands on, and the average lives on."""

    consolidate, regrouped = Momentum.consolidate, Momentum.regrouped
