"""Mistakes of authors who follow the page on own compressors: a quantiser, a sketch, a top-k."""

import numpy as np

from broken.right import Cells, Jumping, Sketched
from ringlet.compressors import Round, Traits


class EpsilonBesideOmega(Cells):
    """Claims to be unbiased, and adds an epsilon to its scales."""

    def traits(self):
        return Traits(fixed_size=True, granularity=64, omega=0.01)

    def compress(self, x, ctx):
        xp = ctx.xp
        payload = super().compress(x, ctx)
        steps = payload["steps"] + np.float32(1e-8)
        wide = steps.repeat(64)[: x.size]
        with np.errstate(all="ignore"):
            codes = xp.floor(x / wide + ctx.uniform(x.size))
        codes = xp.where(xp.isfinite(wide), xp.minimum(codes, 127), 0)
        return {"codes": codes.astype("int8"), "steps": steps}


class GapAsLargeAsAJump(Jumping):
    """A gap of just 65535 is sent as the code that jumps."""

    def jumps(self, skipped):
        return skipped // (self.jump + 1)


class CountsJumps(Jumping):
    """Says that there are as many values as gaps, though a jump has none."""

    def chained_count(self, payload, n):
        return payload["gaps"].size


class HashesByName(Sketched):
    """Seeds the hashes with Python's hash, which differs between the processes of two ranks."""

    def rng(self, ctx):
        return np.random.default_rng([abs(hash(ctx.name)), ctx.step])


class HashesOfOneRank(Sketched):
    """Draws the hashes as noise is drawn: every rank its own."""

    def rng(self, ctx):
        return ctx.rng()


class CandidatesByOwnData(Sketched):
    """Exchanges as many entries as this rank has large ones."""

    def count(self, x, ctx):
        return max(1, int((ctx.xp.abs(x) > 2 * ctx.xp.abs(x).mean()).sum())) if x.size else 1


class YieldsScratchLater(Sketched):
    """Yields scratch memory in its second round."""

    def values(self, mine, ctx):
        scratch = ctx.workspace.array("mine", mine.size)
        scratch[:] = mine
        return (yield Round(scratch, "mean"))


class ValuesNotDivided(Sketched):
    """Takes the sum of the candidates' values for their mean."""

    def values(self, mine, ctx):
        return (yield Round(mine, "sum"))


class LocalNotWritten(Sketched):
    """Leaves `local` as it was."""

    def share(self, local, places, mine, out):
        pass


class LocalIsOut(Sketched):
    """Leaves the mean in `local`: residuals take up how ranks differ, in every step anew."""

    def share(self, local, places, mine, out):
        local[:] = out


class RemembersInRounds(Sketched):
    """Exchanges what the candidates were in the step before, and does not say that it remembers."""

    def values(self, mine, ctx):
        before = ctx.state.get("before", mine)
        if before.size != mine.size:
            before = mine
        ctx.state["before"] = mine.copy()
        return (yield Round(before.copy(), "mean"))


class TakesNoLocal(Sketched):
    """Has no `local` among its arguments."""

    def exchange(self, x, out, ctx):
        yield from super().exchange(x, out, ctx)


class LocalOfWhatWasMeant(Sketched):
    """Leaves in `local` the values that it yielded, not what something behind made of them."""

    def values(self, mine, ctx):
        return (yield Round(mine.copy(), "mean"))


class GapWithoutItsJump(GapAsLargeAsAJump):
    """A gap of just 65535 wraps to none: whoever comes behind it lies 65535 elements too early."""

    def rest(self, skipped):
        return skipped % self.jump


class ClaimsTooMuchInRounds(Sketched):
    """Declares the delta of a sketch that had no collisions, and ten times as many values."""

    def traits(self):
        return Traits("rounds", delta=0.5)


class LooksAtWhatIsGone(Sketched):
    """Looks at what a round gave after the next one, when something else lies there."""

    def exchange(self, x, out, ctx, local=None):
        largest = yield Round(ctx.xp.abs(x).max(initial=0, keepdims=True), "max")
        yield from super().exchange(x, out, ctx, local)
        out *= ctx.xp.isfinite(largest)


class WantsADimension(Sketched):
    """Takes the number of cells from the first dimension, which a scalar has not."""

    def count(self, x, ctx):
        return max(1, ctx.shape[0] // 50)
