"""Whether what is declared is possible, is read, and travels as text.

Options are tried at their ends, and with other words: what users write who did not write them.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import pickle
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Part, Traits, wrapped_fields
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.core.errors import CompressorError, OptionError
from ringlet.compressors.core.options import options_of
from ringlet.compressors.quantizers.quantize import Int8
from ringlet.compressors.specs.parser import parse
from ringlet.compressors.testing.checks.claims import check_direction
from ringlet.compressors.testing.checks.one_call import check_fits_layout
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.other_time import later
from ringlet.compressors.testing.tools.plugin_code import names_used
from ringlet.compressors.testing.tools.simulate import by_payload, context, encode, simulate

# Words for what a trait says, the trait, and whether a value of it says so.
_WORDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "unbiased": ("omega", lambda omega: omega is not None),
    "contractive": ("delta", lambda delta: delta is not None),
    "linear": ("combine", lambda combine: combine == "sum"),
    "additive": ("combine", lambda combine: combine == "sum"),
}
_LATER = 100_001  # seconds
_ALIKE = 0.85  # of 1: names that differ in a letter or an ending
_MANY = 200  # of what has no upper end: more than a byte with a sign holds
_MOST = 1 << 16  # a larger end may be meant for memory that is not here
_PAIRS = 24  # of options that are changed together
_LENGTHS = (2000, 64, 1, 0)
_RAMP, _CHUNK = 4096, 64
_LIKE = 0.1  # the cosine that is asked for at most: a sketch of few cells may be far off
_AGAINST = -0.4  # of a chunk's energy, in four steps
_NO_WORDS = ("certainly_no_choice", "nor_this_one_either")  # of other lengths


def check_traits_are_traits(compressor: Compressor) -> None:
    """The engine chooses collectives by the traits; nonsense there breaks far from its cause.

    Define ``def traits(self): return Traits(...)`` with the fields that docs/own-compressor.md
    lists, and layout(n) where it says fixed_size=True. divergence() returns a text or None, and
    validate() nothing: it raises OptionError.
    """
    assert callable(compressor.traits), "traits is a value; define it as a method, traits(self)"
    traits = compressor.traits()
    assert isinstance(traits, Traits), f"traits() returned {traits!r}"
    for name in ("omega", "delta"):
        value = getattr(traits, name)
        number = isinstance(value, int | float | np.number) and not np.isnan(value)
        assert value is None or number, f"{name} is {value!r}; it is a number, or None"
    assert traits == compressor.traits(), "traits() gives something else every time"
    assert traits.combine in ("sum", "gather", "rounds"), (
        f"combine is {traits.combine!r}, not 'sum', 'gather' or 'rounds'"
    )
    granule = traits.granularity
    assert granule is None or (isinstance(granule, int) and granule > 0), (
        f"granularity must be a number of elements, not {granule!r}; None says never to cut"
    )
    assert isinstance(traits.min_size, int), (
        f"min_size is {traits.min_size!r}; it is a whole number of elements"
    )
    assert traits.min_size >= 0, "min_size is negative"
    assert traits.delta is None or 0 < traits.delta <= 1, (
        f"delta is {traits.delta}; it is a share of the energy, above 0 and at most 1"
    )
    assert traits.omega is None or traits.omega >= 0, f"omega is {traits.omega}, below 0"
    assert traits.combine != "sum" or traits.fixed_size, (
        "payloads that add up are as long on every rank: combine='sum' takes fixed_size=True "
        "beside layout(n), without which training refuses it"
    )
    reason: Any = compressor.divergence()
    assert reason is None or isinstance(reason, str), (
        f"divergence() returns {reason!r}; return the reason as a text, which users are told, and "
        "None where error feedback may follow"
    )
    for each in _wrapped(compressor):
        said: Any = each.validate()  # type: ignore[func-returns-value]
        assert said is None, (
            f"validate() of {each.label()} returns {said!r}, which nobody takes; raise "
            "OptionError(...) where options do not fit each other"
        )
    if traits.combine == "rounds":
        return
    if traits.fixed_size or traits.combine == "sum":
        layout = compressor.layout(100)
        assert layout == compressor.layout(100), "layout(n) gives something else every time"
        for part in layout:
            assert isinstance(part, Part), (
                f"layout(n) returns {part!r}; write Part('codes', 'int8', n), with what is in it"
            )
            assert isinstance(part.dtype, str), (
                f"layout(n) has {part.dtype!r} as the dtype of {part.name!r}; give its name, such "
                f"as {np.dtype(part.dtype).name!r}"
            )
            assert isinstance(part.elements, int | np.integer), (
                f"layout(100) says that {part.name!r} has {part.elements!r} elements; give a whole "
                "number of them"
            )
        assert traits.combine != "sum" or len(layout) == 1, (
            f"a payload that is summed is one array, not {len(layout)}; what ranks must have in "
            "common first, such as a scale, takes combine='rounds' and exchange()"
        )


@needs("traits_are_traits")
def check_schedule_goes_by_the_step(compressor: Compressor) -> None:
    """at(step) is asked in any order, and more than once: a restart goes back, and ranks that asked
    more often than others must not change sooner.

    Decide by the step that is given, and neither by a count nor by the time. The last entry of a
    list holds for all later steps, and what falls with the step stays above the option's lower end:
    max(0.001, ratio * 0.999**step).
    """
    found: dict[int, Compressor] = {}
    for turn, step in enumerate((0, 9, 0, 300, 10**6) * 10):
        try:
            with later(turn * _LATER):
                now: Any = compressor.at(step)
        except Exception as error:
            error.add_note(f"That is at({step}): a schedule has an answer for every step.")
            raise
        what = f"{now.__name__}, the class" if isinstance(now, type) else type(now).__name__
        assert isinstance(now, Compressor), (
            f"at({step}) returns {what}; "
            "return a compressor, such as self.replace(...), and self where nothing changes"
        )
        before = found.setdefault(step, now)
        assert now == before, f"at({step}) is {before}, and {now} when it is asked again"
    told = [_kinds(each) for each in compressor.over_steps()]
    for step, now in found.items():
        assert _kinds(now) in told, (
            f"at({step}) returns {now}, and over_steps() nothing of that kind; return in "
            "over_steps() all that at() ever returns, so that '| ef' is refused at once where it "
            "cannot follow"
        )
    for outer in _wrapped(compressor):
        for inner in _wrapped(outer):
            changes = inner is not outer and any(inner.at(step) != inner for step in found)
            assert not changes or any(outer.at(step) != outer for step in found), (
                f"at() returns the same in step 0 and in step 1000000, though what it wraps, "
                f"{inner}, follows a schedule; return super().at(step), or leave at() away"
            )


def _kinds(compressor: Compressor) -> list[type[Compressor]]:
    return [type(each) for each in _wrapped(compressor)]


@needs("traits_are_traits")
def check_nothing_is_declared_in_vain(compressor: Compressor) -> None:
    """What is written where nobody reads it is a promise that the engine does not know and the kit
    does not test.

    Promises go into traits(self), and nowhere else; a method is called if it has a hook's name.
    """
    traits = compressor.traits()
    values = {field.name: getattr(traits, field.name) for field in dataclasses.fields(traits)}
    undeclared = {n: value for n, value in values.items() if value == getattr(Traits(), n)}
    own = {name for cls in _own_classes(compressor) for name in vars(cls)}
    for name in sorted(own & undeclared.keys()):
        value = _value(getattr(compressor, name))
        assert value == undeclared[name] or value is NotImplemented, (
            f"{name} = {value!r} is not read; write traits(self): return Traits({name}={value!r})"
        )
    for name in sorted(own & _WORDS.keys()):
        trait, says = _WORDS[name]
        if _value(getattr(compressor, name)) is True:
            assert says(values[trait]), (
                f"{name} = True is not read; write traits(self): return Traits({trait}=...) with "
                f"what {trait} is"
            )
    if type(compressor).__module__.split(".")[0] == "ringlet":
        return  # whose helpers other modules call
    hooks = [n for n in vars(Compressor) if not n.startswith("_") and n != "spec_name"]
    for cls in _own_classes(compressor):
        called = set(names_in(sys.modules[cls.__module__]))
        for name, value in vars(cls).items():
            if name in vars(Compressor) or name in called or not isinstance(value, FunctionType):
                continue
            meant = difflib.get_close_matches(name, hooks, 1, _ALIKE)
            assert not meant, f"nothing calls {name}(); is {meant[0]}() meant?"


@needs("traits_are_traits")
def check_is_a_value(compressor: Compressor) -> None:
    """Ranks compare compressors by their text, and checkpoints and workers carry copies of them:
    equal options must mean an equal value, everywhere.

    Options are class attributes with a type and a default that a spec can write; define neither
    __eq__ nor __str__, and change no option in validate().
    """
    for part in _wrapped(compressor):
        for name, field in options_of(type(part)).items():
            assert _is_literal(field.default), (
                f"option {name!r} of {part.label()} has the default {field.default!r}, which no "
                "spec can write; use a number, a string, True, False or None, and look up by it "
                "what it stands for"
            )
        copied = part.replace()
        assert copied == part, (
            f"the options of {part!r} given once more make {copied!r}; leave them as they are, and "
            "compute what follows from them in a property"
        )
        for name, wrong in _outside(part):
            try:
                part.replace(**{name: wrong})
            except OptionError:
                continue
            raise AssertionError(
                f"{part.label()} takes {name}={wrong!r}, which is out of the option's range; if it "
                "has a __post_init__, that calls super().__post_init__(), which looks at ranges; "
                "validate() is meant for checks of your own"
            )
        for name, changed in _variations(part):
            assert changed != part, f"it is equal to one with another {name}"
            assert str(changed) != str(part), f"another {name} does not show in its spec"
    try:
        copy = pickle.loads(pickle.dumps(compressor))
    except Exception as error:
        raise AssertionError(
            f"it cannot be pickled ({error}); define the class at the top of a module"
        ) from error
    assert copy == compressor, "a pickled copy is not equal to the original"
    assert hash(copy) == hash(compressor), "equal compressors have different hashes"
    assert str(copy) == str(compressor), "equal compressors have different specs"
    text = str(compressor)
    try:
        again = parse(text)
    except CompressorError as error:
        raise AssertionError(f"its text {text!r} is no spec: {error}") from error
    assert again == compressor, f"parse({text!r}) is {again!r}"


def _own_classes(compressor: Compressor) -> Iterator[type]:
    for cls in type(compressor).__mro__:
        if issubclass(cls, Compressor) and cls is not Compressor:
            yield cls


def _value(found: Any) -> Any:
    """Return what an attribute, or a method without arguments, gives."""
    if not callable(found):
        return found
    try:
        return found()
    except TypeError:
        return NotImplemented  # a helper with arguments


def names_in(module: Any) -> Iterator[str]:
    """Yield the names that a module's functions and methods use."""
    for value in list(vars(module).values()):
        inside = vars(value).values() if isinstance(value, type) else ()
        for function in (value, *inside):
            code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
            if isinstance(code, CodeType):
                yield from names_used(code)


def _wrapped(compressor: Compressor) -> Iterator[Compressor]:
    yield compressor
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]
        inner = getattr(compressor, field.name)
        if "wrapped" in field.metadata and isinstance(inner, Compressor):
            yield from _wrapped(inner)


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _outside(compressor: Compressor) -> Iterator[tuple[str, Any]]:
    """Yield an option's name and a value that is beyond each end of its range."""
    for name, field in options_of(type(compressor)).items():
        kind = type(field.default)
        if kind not in (int, float):
            continue
        for limit, beyond in (("gt", 0), ("lt", 0), ("ge", -1), ("le", 1)):
            end = field.metadata.get(limit)
            if end is not None and np.isfinite(end):
                yield name, kind(end) + beyond


def _variations(compressor: Compressor) -> Iterator[tuple[str, Compressor]]:
    """Yield an option's name and a copy in which it differs, for every option that can."""
    for name, field in options_of(type(compressor)).items():
        value = getattr(compressor, name)
        others: list[Any] = list(field.metadata.get("choices") or ())
        if isinstance(value, bool):
            others += [not value]
        elif isinstance(value, (int, float)):
            others += [value + 1, value * 2, value / 2 if isinstance(value, float) else value // 2]
        for other in others:
            if other == value:
                continue
            try:
                changed = compressor.replace(**{name: other})
            except CompressorError:
                continue
            yield name, changed
            break


class _Finishing(Int8):
    """Leaves a trace where its finish() is called."""

    def finish(self, out: Array, ctx: Context) -> None:
        ctx.state["finished"] = 1.0


@needs("is_a_value", "compresses_a_tensor")
def check_finish_is_passed_on(compressor: Compressor) -> None:
    """A modifier stands in the place of what it wraps: a hook of that one which it does not call is
    not called at all, such as one that renews an estimate.

    Begin finish() with super().finish(out, ctx), and end it with what the modifier does.
    """
    for part in _wrapped(compressor):
        if not isinstance(part, Modifier) or type(part).finish is Modifier.finish:
            continue
        states: list[State] = [{}]
        try:
            simulate(part.replace(inner=_Finishing()), [np.ones(2000, np.float32)], states)
        except CompressorError:
            continue  # what it does not stand behind
        assert "finished" in states[0], (
            f"finish() of {part.label()} does not call that of what it wraps: what stands in front "
            "of it never sees the result"
        )


@needs(*PURE, "is_a_value", "points_the_same_way", "extreme_values")
def check_options_at_their_ends(compressor: Compressor) -> None:
    """Users write whatever an option takes: a value that it takes and that does not work ends their
    run, or trains on garbage.

    Give each option the range in which it works: levels: int = option(7, ge=1, le=127). What
    depends on another option, or on something else, refuse in validate() with OptionError.
    """
    for part in parts_with_options(compressor):
        if not part.is_bound():
            continue
        _check_there_are_some(part)
        ordered, ends = _keeps_order(part), list(ends_of_options(part))
        for name, value, within in ends:
            _check_end(part, {name: value}, within, ordered)
        for changes in islice(_pairs(ends), _PAIRS):
            _check_end(part, changes, True, ordered)


def _pairs(ends: list[tuple[str, Any, bool]]) -> Iterator[dict[str, Any]]:
    """Yield ends of a range together with other ways to compress, which words and switches choose.

    A way may have fewer codes, or more, than the one for which the range was written.
    """
    for way, chosen, _ in ends:
        for name, value, within in ends if isinstance(chosen, (bool, str)) else ():
            if within and not isinstance(value, (bool, str)) and name != way:
                yield {way: chosen, name: value}


def _check_end(part: Compressor, changes: dict[str, Any], within: bool, ordered: bool) -> None:
    """Raise AssertionError where a compressor takes options and does not work with them."""
    try:
        changed = part.replace(**changes)
    except CompressorError:
        return
    options = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    what = f"{part.label()} takes {options}"
    try:
        _check_works(changed)
    except CompressorError:
        return  # which says what it does not take
    except Exception as error:
        error.add_note(f"That is with {options}, which {part.label()} takes.")
        raise
    if not within:
        return
    try:
        check_direction(changed, _LIKE)
    except AssertionError as error:
        raise AssertionError(f"{what}, and then {error}") from error
    assert not ordered or _keeps_order(changed) or _sends_floats(changed), (
        f"{what}, and then some of {_RAMP} rising values come out with the other sign: a code does "
        "not fit its integer type, or its bits"
    )


@needs(*PURE, "is_a_value", "noise_averages_out")
def check_options_refuse_other_words(compressor: Compressor) -> None:
    """A word that is misspelt and taken nevertheless chooses something else in silence: a run is
    then thought to be another one.

    List the words that there are: mode: str = option("nearest", choices=("nearest", "floor")). What
    may be any text, such as a part of tensors' names, must make a difference.
    """
    for part in parts_with_options(compressor):
        for name, field in options_of(type(part)).items():
            if not isinstance(field.default, str) or not part.is_bound():
                continue
            try:
                results = [_with_word(part, name, word) for word in _NO_WORDS]
            except (CompressorError, OSError):
                continue  # it refuses late, and says so, or there is no such file
            except Exception as error:
                error.add_note(f"That is with {name}={_NO_WORDS[0]!r}, which {part.label()} takes.")
                raise
            assert not same(*results), (
                f"{part.label()} takes {name}={_NO_WORDS[0]!r}, and gives what it gives with "
                f"{name}={_NO_WORDS[1]!r}: it is no word that it knows"
            )


def _with_word(compressor: Compressor, name: str, word: str) -> Array:
    """Return results of three steps of tensors that the first of the words may speak of."""
    changed = compressor.replace(**{name: word})
    outs = []
    names = (_NO_WORDS[0], f"{_NO_WORDS[0]}.weight", f"layer.{_NO_WORDS[0]}")
    for step, tensor in zip((0, 1, 100_000), names, strict=True):
        x = gaussian(2000, step)
        outs += simulate(changed, [x, -2 * x], step=step, name=tensor, shape=(40, 50))
    return np.concatenate(outs)


def parts_with_options(compressor: Compressor) -> Iterator[Compressor]:
    """Yield the compressor, and those that it wraps; each can compress by itself.

    What it wraps of Ringlet's own was tried by itself.
    """
    yield compressor
    for field in wrapped_fields(type(compressor)):
        inner = getattr(compressor, field.name)
        if isinstance(inner, Compressor):
            own = type(inner).__module__.partition(".")[0] == "ringlet"
            yield from (part for part in parts_with_options(inner) if part is not inner or not own)


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


def ends_of_options(compressor: Compressor) -> Iterator[tuple[str, Any, bool]]:
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


def _sends_floats(compressor: Compressor) -> bool:
    """Whether there are no codes that could wrap round: a sketch's estimates are off by luck."""
    now, x = compressor.at(0), np.ones(_RAMP, np.float32)
    if not by_payload(now):
        return False
    return all(part.dtype.kind == "f" for part in encode(now, x, context(x)).values())


CHECKS = (
    check_finish_is_passed_on,
    check_traits_are_traits,
    check_schedule_goes_by_the_step,
    check_nothing_is_declared_in_vain,
    check_is_a_value,
    check_options_at_their_ends,
    check_options_refuse_other_words,
)
