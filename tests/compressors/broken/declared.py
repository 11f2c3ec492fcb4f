"""What is declared where nobody looks: attributes, misspelt methods, options that do not travel."""

import enum
from typing import Any, ClassVar

import numpy as np

from broken.right import CELL, Added, Cells, Compressor, Largest, Momentum, Part, Traits, Whole
from ringlet.compressors import Modifier, option


class UnbiasedAttribute(Whole):
    """Declares by an attribute what `traits` does not say."""

    unbiased = True


class StatefulAttribute(Momentum):
    """Declares its memory by an attribute."""

    stateful = True

    def traits(self):
        return Traits()


class OmegaOption(Cells):
    """Declares omega as what turns out to be an option of the spec."""

    omega: float = 0.01

    def rounded(self, places, ctx):
        return ctx.xp.minimum(ctx.xp.floor(places + ctx.uniform(places.size)), np.float32(127))


class CombineAttribute(Whole):
    """Says by an attribute how payloads combine."""

    combine = "sum"


class TraitsValue(Cells):
    """Assigns traits in place of defining the method."""

    traits = Traits(fixed_size=True, granularity=CELL)


class MinSizeAttribute(Whole):
    """Wants small tensors compressed too, and says it where nobody looks."""

    min_size: ClassVar[int] = 0


class MisspeltHook(Cells):
    """Overrides `encode_to`, which nothing calls."""

    def encode_to(self, x, payload, ctx):
        super().encode_into(x, payload, ctx)


class MisspeltFeedback(Whole):
    """Overrides `feedback_in`, which nothing calls."""

    def feedback_in(self, x, residual, decay, payload, ctx):
        super().feedback_into(x, residual, decay, payload, ctx)


class MisspeltTraits(Whole):
    """Defines `trait`, so that nothing is declared."""

    def trait(self):
        return Traits(delta=0.9)


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


class EnumOption(Whole):
    """An option that no spec can write."""

    rounding: Rounding = Rounding.NEAREST


class DtypeOption(Whole):
    """A type as an option."""

    dtype: type = np.float16


class FunctionOption(Whole):
    """A function as an option."""

    norm: Any = np.linalg.norm


class RewritesOption(Whole):
    """Changes an option after it was given, so that the spec says something else each time."""

    bits: int = 8

    def validate(self):
        object.__setattr__(self, "bits", self.bits + 1)


class OwnText(Whole):
    """Writes its options in its own way, which no spec reads."""

    bits: int = 8

    def __str__(self):
        return f"Whole with {self.bits} bits"


class LooksEqual(Whole):
    """Is equal to others of its class whatever the options."""

    bits: int = 8

    def __eq__(self, other):
        return type(self) is type(other)

    def __hash__(self):
        return 1


class MisspeltDecoder(Compressor):
    """Defines `decompres`."""

    def compress(self, x, ctx):
        return {"values": x.copy()}

    def decompres(self, payload, out, ctx):
        out[:] = payload["values"]


class FixedWithoutLayout(Whole):
    """Declares a fixed size and gives no layout."""

    def traits(self):
        return Traits(fixed_size=True)


class NegativeGranularity(Cells):
    """Declares granularity 0, meaning 'anywhere'."""

    def traits(self):
        return Traits(fixed_size=True, granularity=0)


class UnknownCombine(Whole):
    """Declares a combination that there is not."""

    def traits(self):
        return Traits("mean")  # type: ignore[arg-type]


class SumOfTwoArrays(Whole):
    """Sums two arrays on the wire, of which one is a scale."""

    def traits(self):
        return Traits("sum", fixed_size=True)

    def layout(self, n):
        return (Part("codes", "int8", n), Part("step", "float32", 1))


class ImpossibleDelta(Whole):
    """Contracts by more than everything."""

    def traits(self):
        return Traits(delta=1.5)


class OmegaIsNaN(Whole):
    """Has divided zero by zero."""

    def traits(self):
        return Traits(omega=np.inf - np.inf)


class SizeOfFloat(Whole):
    """Gives a number of elements that is not whole."""

    def traits(self):
        return Traits(min_size=1e3)


class SumOfAnyLength(Added):
    """Declares that payloads add up, and not that they are as long on every rank."""

    def traits(self):
        return Traits("sum")


class DivergesIndeed(Whole):
    """Says that feedback behind it would diverge, and not why."""

    def divergence(self):
        return True


class AnswersWhetherItFits(Whole):
    """Returns from validate() whether options fit each other, which nobody looks at."""

    block: int = option(64, ge=1, le=4096)
    parts: int = option(4, ge=1, le=64)

    def validate(self):
        return self.block % self.parts == 0


class UnreadOption(Largest):
    """Offers a ratio, and sends a sixteenth whatever that is."""

    ratio: float = option(1 / 16, gt=0, le=1, doc="share of the entries that travel")


class UnreadByItsModifier(Modifier):
    """The same, of a modifier."""

    strength: float = option(1.0, ge=0.5, le=2)


class LaterUnannounced(Whole):
    """Is something else in later steps, which nobody learns of before."""

    def at(self, step):
        return Largest() if step >= 300 else self
