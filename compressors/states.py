"""What is done to a tensor's state between steps: by a loss scale, a new spec, another world size.

Arrays may be of any array module; ``Traits.gradient_units`` names those in units of the gradient.
Such units are those of what is compressed: the gradient, prescaled, or its share of the mean
(``average``) among ``size`` ranks where a compressor divides first. What is held back of the sum
of a shard is in units of the result instead: of the sum times ``postscale``, or of the mean.
What is held back of a table's rows is in units of the gradient itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.base.nesting import innermost, is_plugin, nested, overrides
from ringlet.compressors.core.context import SECOND_STAGE, Context, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.remembered import described
from ringlet.compressors.core.shard_name import ShardName, is_shard
from ringlet.compressors.lowrank.powersgd import LowRank
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.modifiers.ef21 import EF21
from ringlet.compressors.modifiers.hadamard import Hadamard
from ringlet.compressors.modifiers.residuals import broken, check, forget, held_back, plain, widen
from ringlet.compressors.modifiers.residuals import rescale as rescale_narrow
from ringlet.compressors.sparsifiers.randomk import RandomK
from ringlet.compressors.specs.parser import parse

_OF_SUM = re.compile(re.escape(SECOND_STAGE) + "(0|[1-9][0-9]{0,17})")
_OF_RESULT = "server"  # what EF21 remembers in units of the result, and not of the gradient
_BFLOATS = ("residual_bf16", "residual_scales")  # the bits of bfloat16
_FLOATS = ("residual", "left", "right", "rows", "u", "v", *_BFLOATS)
_MANY = 1 << 20  # elements of a tensor that nobody has
_LOCAL = 1 << 12  # more ranks than a host has, each with a shard of a tensor


def rescale(state: State, compressor: Compressor, factor: float) -> None:
    """Multiply what ``state`` holds in units of the gradient by ``factor``, of parts of it too."""
    _rescale(state, frozenset(compressor.traits().gradient_units), factor)


def prescale(state: State, compressor: Compressor, factor: float) -> None:
    """Multiply what ``state`` holds in units of what is compressed by ``factor``.

    Not what is held back of sums, nor the mean that EF21 adds up, which are in units of the result.
    """
    names = frozenset(compressor.traits().gradient_units) - {_OF_RESULT}
    _rescale(state, names, factor, sums=False)


def carry_over(
    state: State, before: Compressor, after: Compressor, size: int, average: bool,
    postscale: float = 1.0,
) -> list[str]:  # fmt: skip
    """Keep of ``state`` what ``after`` can go on with; return the names of what is forgotten.

    That is the step, the residual of error feedback, factors of the same low-rank compressor, of
    whose rows as many are used as fit, and all in units of the gradient where nothing but options
    has changed.
    """
    if before == after:
        return []
    widen(state)  # a residual in fewer bits may be kept in others from now on
    kept, units = {"step"}, set[str]()
    if _feeds_back(before) and _feeds_back(after):
        kept |= {"rows"}  # the residual of a table whose gradient is sparse
        units |= {"residual"}
        if parts := _parts(state, before, size, average, postscale):
            state["residual"] = _added(state.get("residual"), parts)
        for part in parts:
            forget(part.state)
    if [type(each) for each in nested(before)] == [type(each) for each in nested(after)]:
        both = {*before.traits().gradient_units} & {*after.traits().gradient_units}
        units |= {n for n in both if before.units_size(n, _MANY) == after.units_size(n, _MANY)}
    first, last = innermost(before), innermost(after)
    if isinstance(first, LowRank) and type(first) is type(last):
        kept |= {"left", "right"}
    forgotten = _without(state, kept | units)
    factor = _share(after, size) / _share(before, size) if average else 1.0
    if factor != 1.0:
        _rescale(state, frozenset(units), factor)
    return forgotten


def fit(
    state: State, spec: str | None, compressor: Compressor, numel: int | None, size: int,
    average: bool = True, postscale: float = 1.0,
) -> list[str]:  # fmt: skip
    """Keep of a ``state`` that ``spec`` left what fits ``compressor``; return what does not fit.

    In sentences without a subject. ``spec`` and ``numel``, the tensor's elements, are None where
    nobody knows them. Arrays are NumPy's.
    """
    before = compressor if spec in (None, str(compressor)) else _parsed(str(spec))
    told = _without_broken(state, before) + _without_foreign_shards(state, numel)
    if spec is not None and spec != str(compressor):
        if before is None:
            forgotten = _without(state, {"step"})
        else:
            forgotten = carry_over(state, before, compressor, size, average, postscale)
        if forgotten:
            told.append(_of_another(spec, compressor, forgotten))
    if numel is not None:
        told += _without_other_sizes(state, compressor, numel)
    return told + _rows_left(state, before, compressor)


def _without_broken(state: State, compressor: Compressor | None) -> list[str]:
    """Forget what cannot be read, or gone on with, of what ``compressor`` has remembered.

    None where nobody knows it. Returns what to say of that.
    """
    told = []
    if wrong := broken(state) or _strange_residual(state, compressor):
        forget(state)
        told.append(f"holds {wrong}; its residual is forgotten")
    units = () if compressor is None else compressor.traits().gradient_units
    anything = compressor is None or is_plugin(compressor)
    strange = [name for name in units if name in state and not _remembers(state[name], anything)]
    if strange:  # replicas would part by a half of what ranks have in common
        held = " and ".join(f"{name!r} as {described(state[name])}" for name in strange)
        _without(state, {"step"})
        told.append(f"holds {held}; all but its step is forgotten")
    # Every later step would be infinite, too.
    floats = sorted({*units, *_FLOATS} & state.keys())
    infinite = [name for name in floats if _infinite(state[name], name in _BFLOATS)]
    if infinite:
        _without(state, {"step"})
        told.append(
            f"holds values of {infinite} that are not finite; all but its step is forgotten"
        )
    for part in [value for value in state.values() if isinstance(value, dict)]:
        told += _without_broken(part, compressor)
    return told


def _strange_residual(state: State, compressor: Compressor | None) -> str | None:
    """Return what is wrong with a residual of error feedback; None if nothing is."""
    found = state.get("residual")
    if found is None or not _feeds_back(compressor):
        return None
    fits = getattr(found, "dtype", None) == np.float32 and found.ndim == 1
    return None if fits else f"'residual' as {described(found)}, not float32"


def _remembers(value: Any, anything: bool) -> bool:
    """Whether ``value`` may be in units of the gradient: flat float32, as our compressors have it.

    Of a plugin (``anything``) it may be a number, and an array of what is no float.
    """
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if not anything:
        return len(shape) == 1 and bool(dtype == np.float32)
    return not isinstance(value, dict | str) and (
        shape == () or dtype == np.float32 or np.dtype(dtype).kind not in "fc"
    )


def _infinite(value: Any, bfloat: bool) -> bool:
    """Whether there is an Inf or a NaN in an array, perhaps of bits of bfloat16, or a number."""
    found = np.asarray(value)
    if bfloat:
        return bool(((found.view("uint16") & 0x7F80) == 0x7F80).any())
    return found.dtype.kind in "fc" and not bool(np.isfinite(found).all())


def _without_foreign_shards(state: State, numel: int | None) -> list[str]:
    """Forget what is of shards of another tensor, or of no known one; return what to say of it."""
    told = []
    of_nobody = [key for key in state if is_shard(key) and ShardName.read(key) is None]
    lost = [key for key in of_nobody if not bare({key: state.pop(key)})]
    if lost:
        told.append(f"is of a Ringlet that told no elements of {lost}, which are forgotten")
    places = [place for key in state if (place := ShardName.read(key)) is not None]
    if any(place.numel != numel for place in places) and numel is not None:
        told.append(f"has {numel} elements; that of shards of {places[0].numel} is forgotten")
        _without(state, {"step"})
    return told


def _without_other_sizes(state: State, compressor: Compressor, numel: int) -> list[str]:
    """Forget what is of a tensor of another size than ``numel``; return what to say of it."""
    told = []
    for name in compressor.traits().gradient_units:
        array = state.get(name)
        if name == "residual" and array is None:
            array = next(
                (state[key] for key in ("residual_bf16", "residual_int8") if key in state), None
            )
        wanted = compressor.units_size(name, numel)
        if getattr(array, "shape", ()) in ((), (wanted,)):  # or a number
            continue
        told.append(f"has {numel} elements; its {name!r}, {described(array)}, is forgotten")
        # What is left is of that other tensor too: factors, a server's sums, parts of shards.
        _without(state, {"step"})
    if np.size(state.get("rows", ())) not in (0, numel):
        table = described(state["rows"])
        told.append(f"has {numel} elements; what it held back of rows, {table}, is forgotten")
        del state["rows"]
    return told


def _rows_left(state: State, before: Compressor | None, compressor: Compressor) -> list[str]:
    """Return what to say of factors of a higher rank, of which ``compressor`` keeps a part."""
    ranks = [
        c.rank
        for c in (before and innermost(before), innermost(compressor))
        if isinstance(c, LowRank)
    ]
    if len(set(ranks)) != 2:
        return []
    return [
        f"keeps {ranks[1]} of the {len(state[side])} rows of its {side!r}"
        for side in ("left", "right")
        if side in state and len(state[side]) > ranks[1]
    ]


def merged(
    states: Sequence[State], spec: str | None, compressor: Compressor, size: int,
    average: bool = True, postscale: float = 1.0,
) -> tuple[State, list[str]]:  # fmt: skip
    """Return what every one of ``size`` ranks goes on with, where ``states`` are of others.

    ``states`` are those that ``spec`` left, in the order of ranks, the same on every rank. What is
    in units of the gradient is consolidated, the rest forgotten; what ``compressor`` would have
    gone on with otherwise is told, as ``fit`` does. All ranks together hold back what they did of
    the result, be it a mean or a sum.
    """
    before = compressor if spec in (None, str(compressor)) else _parsed(str(spec))
    states = [_copied(state) for state in states]
    told = [what for state in states for what in _without_broken(state, before)]
    among = len(states), average, postscale
    states = [_with_parts(plain(state), before, *among) for state in states]
    held = {key for state in states for key, value in state.items() if not bare({key: value})}
    if before is None:
        return {}, told + ([_of_another(spec, compressor, sorted(held))] if held else [])
    found = before.consolidate(states)
    unit = _share(compressor, size) / _share(before, len(states)) if average else 1.0
    for name, array in found.items():
        more = 1.0 if average or name != "residual" else len(states) / size
        found[name] = array * np.float32(unit * more)
    if _OF_RESULT in found:
        ranks = 1.0 / _share(compressor, size) if average else size
        found[_OF_RESULT] *= np.float32(postscale * ranks)
    units = [name for name in before.traits().gradient_units if name in held - found.keys()]
    told += [f"has another size on some ranks; its {units} are forgotten"] if units else []
    if lost := sorted(set[str]().union(*(_left_in_shards(state, before) for state in states))):
        told.append(f"was reduced over two levels; its {lost} are forgotten")
    if before != compressor:
        forgotten = carry_over(found, before, compressor, size, average=False)
        if forgotten:
            told.append(_of_another(spec, compressor, forgotten))
    return found, told


def own(state: State, compressor: Compressor) -> State:
    """Return what of ``state`` is this rank's own, and in units of its gradient.

    A residual is float32, whatever it is held as; other arrays are those of ``state``.
    """
    found = plain(state)
    rows = {"rows": found["rows"]} if "rows" in found and _feeds_back(compressor) else {}
    return compressor.regrouped(found) | rows


def owed(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float = 1.0
) -> State:
    """Return this rank's ``own``, with what it holds back of its shards and their sums in it.

    What is of sums is owed once, and may be part of any rank's residual, in whose units it is.
    """
    return own(_with_parts(plain(state), compressor, size, average, postscale), compressor)


def of_gradient(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float = 1.0
) -> Any:
    """Return what is ``owed`` in units of this rank's gradient, flat; None where nothing is."""
    found = next(held_back(owed(state, compressor, size, average, postscale)), None)
    unit = _in_gradient(compressor, size, average, postscale)
    return None if found is None else found * np.float32(unit)


def rows_to_residual(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float = 1.0
) -> None:
    """Let what is held back of a table's rows go on in the residual: its gradient is dense now."""
    if "rows" not in state or not _feeds_back(compressor):
        return
    widen(state)
    unit = _in_gradient(compressor, size, average, postscale)
    held = state["rows"].reshape(-1) / np.float32(unit)
    known = state.get("residual")
    if known is None or known.shape == held.shape:  # else one of them is of another variable
        state["residual"] = held if known is None else known + held
        del state["rows"]


def residual_to_rows(
    state: State, compressor: Compressor, shape: tuple[int, ...], size: int, average: bool,
    postscale: float = 1.0,
) -> None:  # fmt: skip
    """Let what is held back of a table go on by row, until the row is used: its gradient is sparse.

    That of shards and sums too. Arrays are NumPy's.
    """
    if state.keys() <= {"step", "rows"} or not _feeds_back(compressor):
        return
    held = of_gradient(state, compressor, size, average, postscale)
    if held is None or held.size != math.prod(shape):
        return
    rows = held.reshape(shape)
    for part in _parts(state, compressor, size, average, postscale):
        forget(part.state)
    forget(state)
    known = state.get("rows")
    state["rows"] = rows if known is None else known + rows


def shared(state: State, compressor: Compressor) -> list[str]:
    """Return the names of what of ``state`` ranks have in common, and not each its own."""
    found = plain(state)
    left = found.keys() - own(state, compressor).keys() - {"step"}
    return sorted(
        key
        for key in left
        if not isinstance(found[key], dict) or shared(found[key], compressor)  # such as a shard's
    )


def everyones(state: State, compressor: Compressor) -> State:
    """Return what another rank's ``state`` holds for every rank: a low-rank compressor's factors.

    EF21's estimates are none of it, of which each rank has a part.
    """
    names = ("left", "right", "step") if isinstance(innermost(compressor), LowRank) else ()
    return {name: state[name] for name in names if name in state}


def counts_in_common(compressor: Compressor) -> bool:
    """Whether ranks that have counted other steps would not get the same from what they exchange.

    Shared random numbers and schedules go by steps, and estimates that all have are of one. So may
    be what a plugin does: nobody can tell.
    """
    by_step = LowRank | RandomK | Hadamard | EF21
    if is_plugin(compressor) or overrides(compressor, "at"):
        return True
    return any(isinstance(each, by_step) for each in nested(compressor))


def forget_shared(state: State, compressor: Compressor) -> None:
    """Forget what of ``state`` ranks have in common; dicts in it stay the same objects."""
    for key in shared(state, compressor):
        if isinstance(state.get(key), dict):
            forget_shared(state[key], compressor)
        elif key == "residual":
            forget(state)  # in however few bits
        else:
            del state[key]


def resize(
    state: State, compressor: Compressor, before: int, after: int, average: bool,
    owed: bool = False, postscale: float = 1.0,
) -> None:  # fmt: skip
    """Keep of ``state`` what goes on among ``after`` ranks instead of ``before``, or other ones.

    That is the step and what is this rank's ``own``. What ranks have in common (factors, the means
    of EF21) others may not have: it is forgotten. Shards belong to other ranks now: what error
    feedback holds back of them, and of their sums, goes on in the residual.

    What is kept stays what it is in units of the gradient. If it is ``owed``, its share of a mean
    stays what it is, as that of sums always does: so the mean over all ranks does where ranks come
    with nothing, and where others ``take_over`` from those that go.
    """
    step = {"step": state["step"]} if "step" in state else {}
    kept, parts = own(state, compressor), _parts(state, compressor, before, average, postscale)
    state.clear()
    state |= step
    for name, array in kept.items():
        unit = _unit(name, compressor, before, after, average, owed)
        state[name] = array if unit == 1.0 else array * np.float32(unit)
    if parts:
        where = "residual", compressor, before, after, average
        factors = [_unit(*where, owed or part.of_sum) for part in parts]
        state["residual"] = _added(state.get("residual"), parts, factors)


def reclaim(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float,
    gone: Callable[[str], bool],
) -> None:  # fmt: skip
    """Remove the states of parts of the tensor, by key, that are ``gone``.

    What error feedback holds back in them goes on in the residual, if need be a new one.
    """
    parts = {key: state.pop(key) for key in [key for key in state if gone(key)]}
    if not parts or not _feeds_back(compressor) or not postscale or broken(state):
        return
    widen(state)
    known = state.get("residual")
    whole = parts if known is None else parts | {"residual": known}
    if found := _parts(whole, compressor, size, average, postscale):
        state["residual"] = _added(known, found)


def reorder(state: State, compressor: Compressor, index: Any, size: int) -> list[str]:
    """Let ``state`` be of a tensor whose elements are those at ``index``, in that order.

    Keeps the step and what is this rank's own, if it is as long as the tensor, with what it holds
    back of shards and sums in it; returns the names of what is forgotten. Gradients are averaged
    over ``size`` ranks, of which none has predivided. Arrays are NumPy's.
    """
    held = owed(state, compressor, size, average=True)
    kept = {name: a[index] for name, a in held.items() if np.shape(a) == np.shape(index)}
    if "residual" in kept:
        for each in (state, *(part.state for part in _parts(state, compressor, size, True, 1.0))):
            forget(each)
    others = state.keys() - kept.keys() - {"step"}
    lost = sorted(name for name in others if not bare({name: state[name]}))
    step = {"step": state["step"]} if "step" in state else {}
    state.clear()
    state |= step | kept
    return lost


def whole_residual(compressor: Compressor, ctx: Context) -> Any:
    """Return error feedback's residual of a whole tensor, float32 from now on; None for none.

    Raises CompressorError where it is broken, or of another size than ``ctx.numel``.
    """
    if not _feeds_back(compressor):
        return None
    widen(ctx.state)
    residual = ctx.state.get("residual")
    if residual is not None:
        check(residual, ctx.numel, ctx)
    return residual


def _feeds_back(compressor: Compressor | None) -> bool:
    """Whether error feedback keeps its residual at the top of the state."""
    while isinstance(compressor, Modifier):
        if type(compressor) is ErrorFeedback:
            return True
        compressor = compressor.inner
    return False


def take_over(
    state: State,
    compressor: Compressor,
    given: Mapping[str, Any],
    before: int,
    after: int,
    average: bool,
) -> None:
    """Add what was another rank's ``own`` among ``before`` ranks to ``state``, among ``after``.

    Ranks owe together what they did, if all of them ``resize`` what is ``owed``. What is remembered
    in arrays of other shapes is left alone.
    """
    widen(state)
    for name, array in given.items():
        more = array * np.float32(_unit(name, compressor, before, after, average, owed=True))
        if name not in state:
            state[name] = more
        elif np.shape(state[name]) == more.shape:
            state[name] = state[name] + more


def bare(state: State) -> bool:
    """Whether there is nothing in ``state``, and in the states in it, but counts of steps."""
    return all(
        bare(value) if isinstance(value, dict) else key == "step" for key, value in state.items()
    )


def _copied(state: State) -> State:
    """Return a copy of the dicts in ``state``, not of its arrays."""
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in state.items()}


def _without(state: State, kept: set[str]) -> list[str]:
    """Remove all but ``kept`` from ``state``; return the names of what there was to lose."""
    others = sorted(state.keys() - kept)
    return [key for key in others if not bare({key: state.pop(key)})]


class _Part(NamedTuple):
    """What error feedback holds back of a part of a tensor of ``numel``, from element ``start`` on.

    Times ``unit`` it is in the units of the tensor's own residual. It is ``held`` in ``state``.
    """

    start: int
    held: Any
    unit: float
    of_sum: bool  # of what all ranks' values add up to, and not of this rank's, or host's
    numel: int
    state: State


def _with_parts(
    state: State, compressor: Compressor | None, size: int, average: bool, postscale: float
) -> State:
    """Return ``state``, whose residual is float32, with what it holds back of parts in it."""
    parts = [] if compressor is None else _parts(state, compressor, size, average, postscale)
    return state | {"residual": _added(state.get("residual"), parts)} if parts else state


def _parts(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float
) -> list[_Part]:
    """Return what error feedback holds back of this rank's shards, and of sums of its shards."""
    if not _feeds_back(compressor):
        return []
    divided = average and not compressor.traits().predivide  # behind the sum
    # A result is a rank's residual times this, which nobody divides a second time.
    share = postscale / (size if divided else 1)
    residual = plain(state).get("residual")
    shards: list[tuple[ShardName, State, Any]] = []
    for key, part in state.items():  # which a file may have told: anything
        name = ShardName.read(key)
        if name is not None and isinstance(part, dict):
            held = plain(part).get("residual")
            if getattr(held, "shape", ()) == (name.stop - name.start,):
                shards.append((name, part, held))
    if residual is not None:
        numel = residual.size
    else:
        numel = max((name.numel for name, *_ in shards), default=0)
        if not 0 < numel <= _LOCAL * sum(held.size for *_, held in shards):
            return []
    found = _sums(state, 0, numel, 1.0 / share, numel)
    for name, part, held in shards:
        if name.numel == numel:
            unit = size / name.hosts if divided else 1.0  # of a mean inside a host
            found.append(_Part(name.start, held, unit, False, numel, part))
            found += _sums(part, name.start, held.size, 1.0 / share, numel)
    return found


def _left_in_shards(state: State, compressor: Compressor) -> set[str]:
    """Return the names of what is remembered of shards over two levels beside residuals."""
    left = set[str]()
    for key, part in state.items():
        if is_shard(key) and isinstance(part, dict):
            known = _feeds_back(compressor) and ShardName.read(key) is not None
            names = {name for name in plain(part) if not name.startswith(SECOND_STAGE)}
            left |= names - ({"step", "residual"} if known else {"step"})
    return left


def _sums(state: State, first: int, length: int, unit: float, numel: int) -> list[_Part]:
    """Return what is held back of sums of parts of ``length`` elements from ``first`` on."""
    found = []
    for key, part in state.items():
        place = _OF_SUM.fullmatch(key)
        if place is not None and isinstance(part, dict):
            held: Any = plain(part).get("residual")
            start, fits = int(place[1]), len(getattr(held, "shape", ())) == 1
            if fits and start + held.size <= length:
                found.append(_Part(first + start, held, unit, True, numel, part))
    return found


def _added(residual: Any, parts: Sequence[_Part], factors: Sequence[float] | None = None) -> Any:
    """Return ``residual``, None for zeros, with ``parts``, each times its factor, added."""
    held, numel = parts[0].held, parts[0].numel
    total = np.zeros_like(held, shape=numel) if residual is None else residual.copy()
    for part, factor in zip(parts, factors or [1.0] * len(parts), strict=True):
        piece = slice(part.start, part.start + part.held.size)
        total[piece] += part.held * np.float32(part.unit * factor)
    return total


def _unit(
    name: str, compressor: Compressor, before: int, after: int, average: bool, owed: bool
) -> float:
    """Return what something of ``before`` ranks is multiplied by among ``after``."""
    if not average:
        return 1.0
    # Rows are divided by the number of ranks after they were summed, whatever compresses them.
    shares = 1.0 if name == "rows" else _share(compressor, after) / _share(compressor, before)
    return shares * (after / before if owed else 1.0)


def _of_another(spec: str | None, compressor: Compressor, forgotten: list[str]) -> str:
    return f"was saved by {spec!r}; {str(compressor)!r} forgets its {forgotten}"


def _parsed(spec: str) -> Compressor | None:
    """Return what a saved spec stands for; None where that is not installed, or imported, here.

    Whoever has written a checkpoint is not to choose which modules are imported.
    """
    try:
        return parse(spec, imports=False)
    except CompressorError:
        return None


def _rescale(state: State, names: frozenset[str], factor: float, sums: bool = True) -> None:
    if "residual" in names:
        rescale_narrow(state, factor)
    for key, value in state.items():
        if isinstance(value, dict):
            if sums or not key.startswith(SECOND_STAGE):
                _rescale(value, names, factor, sums)
        elif key in names:
            state[key] = _times(value, factor)


def _times(value: object, factor: float) -> object:
    if hasattr(value, "shape"):
        times = value.copy()  # type: ignore[attr-defined]  # who is refused puts the old one back
        times *= np.float32(factor)
        return times
    return value * factor  # type: ignore[operator]  # a number


def _in_gradient(compressor: Compressor, size: int, average: bool, postscale: float) -> float:
    """Return what a residual is multiplied by to be in units of the gradient, as rows are."""
    return postscale / (_share(compressor, size) if average else 1.0)


def _share(compressor: Compressor, size: int) -> float:
    """Return the share of a gradient that is compressed in a mean over ``size`` ranks."""
    return 1.0 / size if compressor.traits().predivide else 1.0
