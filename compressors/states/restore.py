"""What of a tensor's state goes on under another spec, and what of one that was loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.nesting import innermost, is_plugin, nested
from ringlet.compressors.core.context import State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.remembered import described
from ringlet.compressors.core.shard_name import ShardName, is_shard
from ringlet.compressors.lowrank.powersgd import LowRank
from ringlet.compressors.modifiers.residuals import broken, forget, plain, widen
from ringlet.compressors.specs.parser import parse
from ringlet.compressors.states.held_parts import (
    added,
    bare,
    feeds_back,
    held_parts,
    left_in_shards,
    with_parts,
    without,
)
from ringlet.compressors.states.units import OF_RESULT, rescale_named, share

_BFLOATS = ("residual_bf16", "residual_scales")  # the bits of bfloat16
_FLOATS = ("residual", "left", "right", "rows", "u", "v", *_BFLOATS)
_MANY = 1 << 20  # elements of a tensor that nobody has


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
    if feeds_back(before) and feeds_back(after):
        kept |= {"rows"}  # the residual of a table whose gradient is sparse
        units |= {"residual"}
        if parts := held_parts(state, before, size, average, postscale):
            state["residual"] = added(state.get("residual"), parts)
        for part in parts:
            forget(part.state)
    if [type(each) for each in nested(before)] == [type(each) for each in nested(after)]:
        both = {*before.traits().gradient_units} & {*after.traits().gradient_units}
        units |= {n for n in both if before.units_size(n, _MANY) == after.units_size(n, _MANY)}
    first, last = innermost(before), innermost(after)
    if isinstance(first, LowRank) and type(first) is type(last):
        kept |= {"left", "right"}
    forgotten = without(state, kept | units)
    factor = share(after, size) / share(before, size) if average else 1.0
    if factor != 1.0:
        rescale_named(state, frozenset(units), factor)
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
            forgotten = without(state, {"step"})
        else:
            forgotten = carry_over(state, before, compressor, size, average, postscale)
        if forgotten:
            told.append(_of_another(spec, compressor, forgotten))
    if numel is not None:
        told += _without_other_sizes(state, compressor, numel)
    return told + _rows_left(state, before, compressor)


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
    states = [with_parts(plain(state), before, *among) for state in states]
    held = {key for state in states for key, value in state.items() if not bare({key: value})}
    if before is None:
        return {}, told + ([_of_another(spec, compressor, sorted(held))] if held else [])
    found = before.consolidate(states)
    unit = share(compressor, size) / share(before, len(states)) if average else 1.0
    for name, array in found.items():
        more = 1.0 if average or name != "residual" else len(states) / size
        found[name] = array * np.float32(unit * more)
    if OF_RESULT in found:
        ranks = 1.0 / share(compressor, size) if average else size
        found[OF_RESULT] *= np.float32(postscale * ranks)
    units = [name for name in before.traits().gradient_units if name in held - found.keys()]
    told += [f"has another size on some ranks; its {units} are forgotten"] if units else []
    if lost := sorted(set[str]().union(*(left_in_shards(state, before) for state in states))):
        told.append(f"was reduced over two levels; its {lost} are forgotten")
    if before != compressor:
        forgotten = carry_over(found, before, compressor, size, average=False)
        if forgotten:
            told.append(_of_another(spec, compressor, forgotten))
    return found, told


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
        without(state, {"step"})
        told.append(f"holds {held}; all but its step is forgotten")
    # Every later step would be infinite, too.
    floats = sorted({*units, *_FLOATS} & state.keys())
    infinite = [name for name in floats if _infinite(state[name], name in _BFLOATS)]
    if infinite:
        without(state, {"step"})
        told.append(
            f"holds values of {infinite} that are not finite; all but its step is forgotten"
        )
    for part in [value for value in state.values() if isinstance(value, dict)]:
        told += _without_broken(part, compressor)
    return told


def _strange_residual(state: State, compressor: Compressor | None) -> str | None:
    """Return what is wrong with a residual of error feedback; None if nothing is."""
    found = state.get("residual")
    if found is None or not feeds_back(compressor):
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
        without(state, {"step"})
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
        without(state, {"step"})
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


def _copied(state: State) -> State:
    """Return a copy of the dicts in ``state``, not of its arrays."""
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in state.items()}


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
