"""Options: what another value of one makes is a compressor too, which has to keep to the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, wrapped_fields
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.options import options_of
from ringlet.compressors.testing.checks.claims import check_few_draws
from ringlet.compressors.testing.checks.declared import ends_of_options, parts_with_options
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import Named, needs, what_failed
from ringlet.compressors.testing.tools.other_process import are_ours
from ringlet.compressors.testing.tools.simulate import by_payload, simulate

# What goes by code that another value runs, and is looked at in a few milliseconds.
_LOOKED_AT = (
    "deterministic", "decoding_is_the_same_everywhere", "replicas_agree", "memory_is_declared",
    "scales_with_its_values", "contraction", "granularity", "noise_is_drawn_anew",
    "noise_at_its_ends",
    "sums_on_the_wire", "mean_of_equal_gradients", "shares_make_the_mean", "comes_out_as_long",
)  # fmt: skip
# What error feedback behind the part makes up for.
_OF_THE_WHOLE = ("comes_out_as_long",)


def check_of_options(checks: Sequence[Named]) -> Callable[[Compressor], None]:
    """Return a check that runs the quick ones of ``checks`` with other values of options."""
    looked_at = [check for check in checks if check.name in _LOOKED_AT]

    @needs(
        *_LOOKED_AT,
        "options_at_their_ends",
        "unbiased",
        "non_finite_stays_visible",
        "schedule_keeps_promises",
    )
    def check_other_options_keep_promises(compressor: Compressor) -> None:
        """An option chooses another way to compress: what holds for all compressors, and what
        traits promise, has to be true of that one as well.

        Look at the compressor with that option, alone: ringlet check says the same of it. What
        compress reads of it decompress and layout read as well: self.levels, and not its default.
        What traits() promises may go by options: omega=None if self.nearest else 1.0.
        """
        for part in parts_with_options(compressor):
            if not part.is_bound() or are_ours({type(part).__module__}):
                continue
            for name, value in _others(part):
                try:
                    changed = part.replace(**{name: value})
                    _check_one_call(changed)
                    check_few_draws(changed)
                    for check in looked_at:
                        if check.name in _says_nothing_of(changed):
                            continue
                        whole = check.name in _OF_THE_WHOLE
                        check(_with_part(compressor, part, changed) if whole else changed)
                except CompressorError:
                    continue  # which says what it does not take
                except AssertionError as failure:
                    if isinstance(failure.__cause__, CompressorError):
                        continue
                    told = what_failed(failure)
                    raise AssertionError(f"with {name}={value!r} {told}") from failure

    return check_other_options_keep_promises


def _says_nothing_of(compressor: Compressor) -> set[str]:
    """Return the checks that are not meant for ``compressor``."""
    found = set[str]()
    if compressor.traits().stateful:  # at an end of an option there may be nothing to remember
        found.add("memory_is_declared")
    if by_payload(compressor):  # all decode the same payloads, which another check looks at
        found.add("replicas_agree")
    return found


def _with_part(compressor: Compressor, part: Compressor, changed: Compressor) -> Compressor:
    """Return ``compressor`` with ``changed`` in the place of ``part``, which it is or wraps."""
    if compressor is part:
        return changed
    wrapped = {f.name: getattr(compressor, f.name) for f in wrapped_fields(type(compressor))}
    held = {name: inner for name, inner in wrapped.items() if isinstance(inner, Compressor)}
    made = {name: _with_part(inner, part, changed) for name, inner in held.items()}
    new = {name: inner for name, inner in made.items() if inner is not held[name]}
    return compressor.replace(**new) if new else compressor


def _others(compressor: Compressor) -> Iterator[tuple[str, Any]]:
    """Yield an option's name and a value that it is meant to take, besides the one it has."""
    for name, value, within in ends_of_options(compressor):
        if within:
            yield name, value
    for name, field in options_of(type(compressor)).items():
        now = getattr(compressor, name)
        if type(now) is int and now > 3 and "choices" not in field.metadata:
            yield name, now // 2  # at an end so much is lost that a wrong length does not show
        for end in ("gt", "lt"):
            limit = field.metadata.get(end)
            if isinstance(now, float) and limit is not None and np.isfinite(limit):
                yield name, (now + limit) / 2


def _check_one_call(compressor: Compressor) -> None:
    """Raise AssertionError where a gradient is changed, or NaN in it is lost."""
    x, before = gaussian(2000, 1), gaussian(2000, 1)
    simulate(compressor, [x])
    assert same(x, before), "the input is modified"
    x[1234] = np.nan
    with np.errstate(all="ignore"):
        (out,) = simulate(compressor, [x])
    assert not np.isfinite(out).all(), "NaN at element 1234 of 2000 vanished"
