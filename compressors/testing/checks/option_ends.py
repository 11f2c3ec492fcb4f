"""Checks of options at their ends, and of their words: what users write who did not write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, wrapped_fields
from ringlet.compressors.core.context import Array
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.options import options_of
from ringlet.compressors.testing.checks.claims import check_direction
from ringlet.compressors.testing.checks.one_call import PURE, by_payload, check_fits_layout, same
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import context, simulate

_MANY = 200  # of what has no upper end: more than a byte with a sign holds
_MOST = 1 << 16  # a larger end may be meant for memory that is not here
_LENGTHS = (2000, 64, 1, 0)
_RAMP, _CHUNK = 4096, 64
_LIKE = 0.1  # the cosine that is asked for at most: a sketch of few cells may be far off
_AGAINST = -0.4  # of a chunk's energy, in four steps
_WORDS = ("certainly_no_choice", "nor_this_one_either")  # of other lengths


@needs(*PURE, "is_a_value", "points_the_same_way", "extreme_values")
def check_options_at_their_ends(compressor: Compressor) -> None:
    """Users write whatever an option takes: a value that it takes and that does not work ends their
    run, or trains on garbage.

    Give each option the range in which it works: levels: int = option(7, ge=1, le=127). What
    depends on another option, or on something else, refuse in validate() with OptionError.
    """
    for part in _parts(compressor):
        if not part.is_bound():
            continue
        _check_there_are_some(part)
        ordered = _keeps_order(part)
        for name, value, within in _ends(part):
            try:
                changed = part.replace(**{name: value})
            except CompressorError:
                continue
            what = f"{part.label()} takes {name}={value!r}"
            try:
                _check_works(changed)
            except CompressorError:
                continue  # which says what it does not take
            except Exception as error:
                error.add_note(f"That is with {name}={value!r}, which {part.label()} takes.")
                raise
            if not within:
                continue
            try:
                check_direction(changed, _LIKE)
            except AssertionError as error:
                raise AssertionError(f"{what}, and then {error}") from error
            assert not ordered or _keeps_order(changed), (
                f"{what}, and then some of {_RAMP} rising values come out with the other sign: a "
                "code does not fit its integer type, or its bits"
            )


@needs(*PURE, "is_a_value", "noise_averages_out")
def check_options_refuse_other_words(compressor: Compressor) -> None:
    """A word that is misspelt and taken nevertheless chooses something else in silence: a run is
    then thought to be another one.

    List the words that there are: mode: str = option("nearest", choices=("nearest", "floor")). What
    may be any text, such as a part of tensors' names, must make a difference.
    """
    for part in _parts(compressor):
        for name, field in options_of(type(part)).items():
            if not isinstance(field.default, str) or not part.is_bound():
                continue
            try:
                results = [_with_word(part, name, word) for word in _WORDS]
            except (CompressorError, OSError):
                continue  # it refuses late, and says so, or there is no such file
            except Exception as error:
                error.add_note(f"That is with {name}={_WORDS[0]!r}, which {part.label()} takes.")
                raise
            assert not same(*results), (
                f"{part.label()} takes {name}={_WORDS[0]!r}, and gives what it gives with "
                f"{name}={_WORDS[1]!r}: it is no word that it knows"
            )


def _with_word(compressor: Compressor, name: str, word: str) -> Array:
    """Return results of three steps of tensors that the first of the words may speak of."""
    changed = compressor.replace(**{name: word})
    outs = []
    names = (_WORDS[0], f"{_WORDS[0]}.weight", f"layer.{_WORDS[0]}")
    for step, tensor in zip((0, 1, 100_000), names, strict=True):
        x = gaussian(2000, step)
        outs += simulate(changed, [x, -2 * x], step=step, name=tensor, shape=(40, 50))
    return np.concatenate(outs)


def _parts(compressor: Compressor) -> Iterator[Compressor]:
    """Yield the compressor, and those that it wraps; each can compress by itself.

    What it wraps of Ringlet's own was tried by itself.
    """
    yield compressor
    for field in wrapped_fields(type(compressor)):
        inner = getattr(compressor, field.name)
        if isinstance(inner, Compressor):
            own = type(inner).__module__.partition(".")[0] == "ringlet"
            yield from (part for part in _parts(inner) if part is not inner or not own)


def _check_there_are_some(compressor: Compressor) -> None:
    """Raise AssertionError where an option takes one value alone, for it takes whole numbers."""
    for name, field in options_of(type(compressor)).items():
        low, high = (
            field.metadata.get(closed) if field.metadata.get(closed) is not None else opened
            for closed, opened in (
                ("ge", _beside(field.metadata.get("gt"), 1)),
                ("le", _beside(field.metadata.get("lt"), -1)),
            )
        )
        if type(field.default) is int and low is not None and high is not None:
            assert low < high, (
                f"{compressor.label()}.{name} takes {field.default} alone, for its default is a "
                f"whole number; write {name}: float = option({float(field.default)}, ...)"
            )


def _beside(end: Any, by: int) -> Any:
    return None if end is None else end + by


def _ends(compressor: Compressor) -> Iterator[tuple[str, Any, bool]]:
    """Yield an option's name, a value at an end of it, and whether it is to come through there."""
    for name, field in options_of(type(compressor)).items():
        now, limits = getattr(compressor, name), field.metadata
        found: list[tuple[Any, bool]] = [(choice, True) for choice in limits.get("choices") or ()]
        if isinstance(now, bool):
            found.append((not now, True))
        elif isinstance(now, (int, float)) and not found:
            found += _range_ends(field, now)
        elif now is None and not found:
            found += _ends_of_none(field)
        yield from ((name, value, within) for value, within in found if value != now)


def _ends_of_none(field: dataclasses.Field[Any]) -> list[tuple[Any, bool]]:
    """Return the closed ends of an option that is None by default, and much where there is none."""
    limits = field.metadata
    found = [(limits[end], True) for end in ("ge", "le") if limits.get(end) is not None]
    low = limits.get("ge") if limits.get("ge") is not None else limits.get("gt")
    open_above = limits.get("le") is None and limits.get("lt") is None
    if isinstance(low, int) and open_above and "float" not in str(field.type):
        found.append((max(_MANY, 3 * low + 1), False))  # perhaps as many as no tensor has
    return [(value, within) for value, within in found if abs(value) <= _MOST]


def _range_ends(field: dataclasses.Field[Any], now: Any) -> list[tuple[Any, bool]]:
    limits, kind = field.metadata, type(now)
    if not isinstance(field.default, kind):
        return []
    whole = kind is int
    found: list[tuple[Any, bool]] = []
    for closed, opened, sign in (("ge", "gt", 1), ("le", "lt", -1)):
        if limits.get(closed) is not None:
            found.append((limits[closed], True))
        elif limits.get(opened) is not None:
            end = limits[opened]
            # Near an open end little may be left that comes through, but nothing is NaN.
            found.append((end + sign, True) if whole else (end + (now - end) / 1024, False))
        elif sign > 0:
            found += [(0, False), (-1, False)] if whole else [(0.0, False)]
        elif whole:
            found.append((max(_MANY, 3 * now + 1), True))
    if whole:
        found.append((now + 1, True))  # what divides a length, or is a power of two, no longer is
        found = [(value, within) for value, within in found if abs(value) <= _MOST]
    return [(kind(value), within) for value, within in found if np.isfinite(value)]


def _check_works(compressor: Compressor) -> None:
    """Raise an error where what came of a tensor is no tensor."""
    now = compressor.at(0)
    for n in _LENGTHS:
        x = gaussian(n, n)
        if by_payload(now) and now.traits().fixed_size:
            check_fits_layout(now, now.compress(x.copy(), context(x)), n)
        with np.errstate(all="ignore"):
            outs = simulate(compressor, [x, -2 * x])
        assert np.isfinite(outs).all(), f"{n} finite elements decode to {outs[0]}"


def _keeps_order(compressor: Compressor) -> bool:
    """Whether no part of a ramp comes out with the other sign, where it is well above noise."""
    ramp = np.linspace(-1, 1, _RAMP, dtype=np.float32)
    out = sum(simulate(compressor, [ramp], step=step)[0].astype(np.float64) for step in range(4))
    along = (out * ramp).reshape(-1, _CHUNK).sum(axis=1)
    energy = np.square(ramp).reshape(-1, _CHUNK).sum(axis=1)
    large = energy >= energy.max() / 4  # half as large as the largest values
    return bool((along >= _AGAINST * energy)[large].all())


CHECKS = (check_options_at_their_ends, check_options_refuse_other_words)
