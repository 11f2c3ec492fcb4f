"""Modifiers: what they pass on of traits has to be true of whatever they stand behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.specs.parser import parse
from ringlet.compressors.testing.checks.claims import check_few_draws
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import Named, needs, what_failed
from ringlet.compressors.testing.tools.other_process import are_ours
from ringlet.compressors.testing.tools.simulate import simulate

# Payloads that add up; omega, a fixed size and pieces; delta, and indices; rounds.
_OTHERS = ("none", "qsgd", "topk", "shared_int", "powersgd")
# What says something of traits alone, in a few milliseconds.
_LOOKED_AT = (
    "fixed_size", "sums_on_the_wire", "granularity", "contraction", "shares_make_the_mean",
    "non_finite_stays_visible", "comes_out_as_long",
)  # fmt: skip


def check_of_modifiers(checks: Sequence[Named]) -> Callable[[Compressor], None]:
    """Return a check that runs the quick ones of ``checks`` on a modifier behind others."""
    looked_at = [check for check in checks if check.name in _LOOKED_AT]

    @needs(*_LOOKED_AT, "unbiased", "points_the_same_way", "decoding_is_the_same_everywhere")
    def check_modifier_keeps_promises(compressor: Compressor) -> None:
        """A modifier that passes traits on promises what the compressor in front of it does, of
        what it makes of it: the engine adds payloads up, or cuts tensors, where that is promised.

        Drop in traits(self) what holds no longer, whatever this spec's own compressor promises:
        dataclasses.replace(inner, combine="gather", omega=None, delta=None, granularity=None). Or
        refuse in validate(), with CompressorError, what it cannot stand behind.
        """
        for modifier in _modifiers(compressor):
            for spec in _OTHERS:
                try:
                    changed = modifier.replace(inner=parse(spec))
                    simulate(changed, [gaussian(2000, 1)] * 2)
                except Exception:
                    continue  # it is made for others, and says so
                try:
                    check_few_draws(changed)
                    for check in looked_at:
                        check(changed)
                except CompressorError:
                    continue
                except AssertionError as failure:
                    raise AssertionError(f"behind {spec!r} {what_failed(failure)}") from failure

    return check_modifier_keeps_promises


def _modifiers(compressor: Compressor) -> Iterator[Modifier]:
    while isinstance(compressor, Modifier):
        if not are_ours({type(compressor).__module__}):
            yield compressor
        compressor = compressor.wrapped_compressor
