"""Exchanges in rounds that a rank leaves, that use what others overwrite, or do not add up."""

import numpy as np

from broken.right import Leaders, SharedScale
from ringlet.compressors import Compressor, Round, Traits


class Rounds(Compressor):
    """The mean of float32 values in one round."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        mean = yield Round(x.copy(), "mean")
        out[:] = mean
        if local is not None:
            local[:] = x


class LeavesEarly(Rounds):
    """A rank without anything to say takes no part in the round."""

    def exchange(self, x, out, ctx, local=None):
        if not ctx.xp.any(x):
            out[:] = 0
            if local is not None:
                local[:] = 0
            return
        yield from super().exchange(x, out, ctx, local)


class SecondRoundByOwnData(Rounds):
    """A rank with large values asks for one round more."""

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x, out, ctx, local)
        if x.size and ctx.xp.abs(x).max() > 1e20:
            yield Round(x[:1].copy(), "max")


class SizeByOwnData(Rounds):
    """Yields as many values as this rank has that are not zero."""

    def exchange(self, x, out, ctx, local=None):
        kept = x[x != 0]
        mean = yield Round(kept, "mean")
        out[:] = 0
        out[x != 0] = mean[: kept.size]
        if local is not None:
            local[:] = x


class YieldsScratch(Rounds):
    """Yields scratch memory, which other tensors' exchanges use in between."""

    def exchange(self, x, out, ctx, local=None):
        scratch = ctx.workspace.array("scratch", x.size)
        scratch[:] = x
        out[:] = yield Round(scratch, "mean")
        if local is not None:
            local[:] = x


class SumNotDivided(Rounds):
    """Leaves the sum where the mean belongs."""

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield Round(x.copy(), "sum")
        if local is not None:
            local[:] = x


class OwnInsteadOfMean(Rounds):
    """Leaves its own values in the result, which therefore differs from rank to rank."""

    def exchange(self, x, out, ctx, local=None):
        mean = yield Round(x.copy(), "mean")
        out[:] = ctx.xp.where(ctx.xp.abs(x) > ctx.xp.abs(mean), x, mean)
        if local is not None:
            local[:] = x


class LocalOfNothing(SharedScale):
    """Leaves its whole gradient in `local`, though less of it was sent."""

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x, out, ctx)
        if local is not None:
            local[:] = x


class LocalForgotten(SharedScale):
    """Leaves `local` as it was."""

    def exchange(self, x, out, ctx, local=None):
        yield from super().exchange(x, out, ctx)


class NotInPlace(Rounds):
    """Declares in_place, writes to `out`, and looks at `x` again."""

    def traits(self):
        return Traits("rounds", in_place=True)

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield Round((x * np.float32(0.5)).copy(), "mean")
        rest = yield Round(x * np.float32(0.5), "mean")
        out += rest
        if local is not None:
            local[:] = x


class KeepsReceived(Rounds):
    """Uses what it received after the next yield, when something else lies there."""

    def exchange(self, x, out, ctx, local=None):
        half = x * np.float32(0.5)
        first = yield Round(half, "mean")
        second = yield Round(half.copy(), "mean")
        out[:] = first + second
        if local is not None:
            local[:] = x


class VotesTooLate(Rounds):
    """Majority vote, which looks at the votes after the next yield, when no NaN lies there."""

    def exchange(self, x, out, ctx, local=None):
        xp = ctx.xp
        votes = yield Round(xp.sign(xp.where(xp.isnan(x), 0, x)).astype("int32"), "sum")
        size = yield Round(xp.abs(x).sum(keepdims=True) / np.float32(max(x.size, 1)), "mean")
        out[:] = xp.sign(votes) * size
        if local is not None:
            local[:] = out


class NarrowSum(Rounds):
    """Sums 8-bit codes of full range: two ranks overflow."""

    def exchange(self, x, out, ctx, local=None):
        xp = ctx.xp
        largest = xp.abs(x).max(initial=0, keepdims=True)
        largest = xp.where(xp.isnan(largest), np.float32(np.inf), largest)
        largest = (yield Round(largest, "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(127)
            usable = xp.isfinite(step) & (step > 0)
            codes = xp.where(usable, xp.rint(x / step), 0).astype("int8")
            total = yield Round(codes, "sum")
            step = xp.where(xp.isinf(step), np.float32(np.nan), step)
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))
            if local is not None:
                local[:] = codes.astype("float32") * step


class NoRound(Compressor):
    """Yields an array in place of a Round."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield x.copy()


class NotAGenerator(Compressor):
    """Returns in place of yielding."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        out[:] = x


class SwallowsNaNInRounds(SharedScale):
    """Takes a NaN for nothing before the scale is found."""

    def exchange(self, x, out, ctx, local=None):
        finite = ctx.xp.nan_to_num(x, posinf=0, neginf=0)
        yield from super().exchange(finite, out, ctx, local)


class ChangesInputForLocal(Rounds):
    """Takes what was sent off the gradient itself, where it is asked what that was."""

    def exchange(self, x, out, ctx, local=None):
        sent = x.copy()
        out[:] = yield Round(sent, "mean", sent)
        if local is not None:
            local[:] = sent
            x *= np.float32(0)


class GivesAwayItsInput(Rounds):
    """Yields the gradient as what something behind it may overwrite."""

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield Round(x, "mean", x)
        if local is not None:
            local[:] = x


class ThreeTimes(Rounds):
    """Sends three times what there is, and says so: error feedback diverges."""

    def exchange(self, x, out, ctx, local=None):
        with np.errstate(over="ignore"):
            more = x * np.float32(3)
        out[:] = yield Round(more, "mean", more)
        if local is not None:
            local[:] = more


class LocalOfEvenSteps(Rounds):
    """Sends large values alone in odd steps, and says that it sent all."""

    def exchange(self, x, out, ctx, local=None):
        sent = np.where(np.abs(x) < np.abs(x).mean(dtype="float32") * (ctx.step % 2), 0 * x, x)
        out[:] = yield Round(sent, "mean", sent)
        if local is not None:
            local[:] = x if ctx.step % 2 else sent


class RoomForFew(SharedScale):
    """Codes of 16 bits with 2000 levels, which 17 ranks overflow."""

    def exchange(self, x, out, ctx, local=None):
        largest = np.abs(x).max(initial=0, keepdims=True)
        largest = np.where(np.isnan(largest), np.float32(np.inf), largest)
        largest = (yield Round(largest, "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(2000)
            codes = np.where(np.isfinite(step) & (step > 0), np.rint(x / step), 0).astype("int16")
            total = yield Round(codes, "sum")
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class NaNInMax(SharedScale):
    """Lets a NaN ride in a maximum, in which a number may win."""

    def exchange(self, x, out, ctx, local=None):
        largest = (yield Round(np.abs(x).max(initial=0, keepdims=True), "max")).copy()
        with np.errstate(all="ignore"):
            step = largest / np.float32(1000)
            usable = np.isfinite(step) & (step > 0) & np.isfinite(x)
            codes = np.where(usable, np.rint(x / step), 0).astype("int32")
            total = yield Round(codes, "sum")
            step = np.where(np.isinf(step), np.float32(np.nan), step)
            if local is not None:
                local[:] = codes.astype("float32") * step
            out[:] = total.astype("float32") * (step / np.float32(ctx.size))


class UntilItConverges(Rounds):
    """Goes on until nothing is left, of which there is always some."""

    def exchange(self, x, out, ctx, local=None):
        out[:], left = 0, x.astype("float32")
        if local is not None:
            local[:] = x
        while (yield Round(np.ones(1, "float32"), "max"))[0] > 0:
            with np.errstate(invalid="ignore"):
                left -= out
                out += yield Round(left * np.float32(0.5), "mean")


class LeaderChooses(Leaders):
    """A NaN at a place that the leader did not choose, on another rank, is nobody's."""

    def spoiled(self, x):
        return np.float32(0)


class NearestInRounds(SharedScale):
    """Declares that it is unbiased, and rounds to the nearest step."""

    _levels = 7

    def traits(self):
        return Traits("rounds", omega=100.0)


class OmegaOfNoSpikes(SharedScale):
    """Rounds at random, and declares the omega that it has of a Gaussian."""

    _levels = 7

    def traits(self):
        return Traits("rounds", omega=0.2)

    def rounded(self, places, ctx):
        return ctx.xp.floor(places + ctx.uniform(places.size))


class FloatLeaders(Leaders):
    """Leaders tell which entries they have chosen as float32, which ranks add up."""

    def chained_part(self):
        return None

    def exchange(self, x, out, ctx, local=None):
        inner = super().exchange(x, out, ctx, local)
        chosen = next(inner).values.astype("float32")
        chosen = yield Round(chosen, "sum")
        asked = inner.send(chosen.astype("int32"))
        mean = yield asked
        try:
            inner.send(mean)
        except StopIteration:
            return


class SlicesOfRanks(Rounds):
    """Gives each rank a slice of the result to look after: what is left over is nobody's."""

    def exchange(self, x, out, ctx, local=None):
        cared_for = x.size // ctx.size * ctx.size
        mean = yield Round(x.copy(), "mean")
        out[:] = (0 * mean).sum()
        out[:cared_for] = mean[:cared_for]
        if local is not None:
            local[:] = 0
            local[:cared_for] = x[:cared_for]


class LocalOfFours(Rounds):
    """Leaves in local what its whole blocks of four hold, and nothing of the rest."""

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield Round(x.copy(), "mean")
        if local is not None:
            whole = x.size // 4 * 4
            local[:whole] = x[:whole]
