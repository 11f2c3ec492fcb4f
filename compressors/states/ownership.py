"""What of a tensor's state is a rank's own, or is owed, and what ranks have in common.

A rank's own goes on when ranks come and go. What it owes, it has held back of its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.nesting import innermost, is_plugin, nested, overrides
from ringlet.compressors.core.context import Context, State
from ringlet.compressors.lowrank.powersgd import LowRank
from ringlet.compressors.modifiers.ef21 import EF21
from ringlet.compressors.modifiers.hadamard import Hadamard
from ringlet.compressors.modifiers.residuals import broken, check, forget, held_back, plain, widen
from ringlet.compressors.sparsifiers.randomk import RandomK
from ringlet.compressors.states.held_parts import added, bare, feeds_back, held_parts, with_parts
from ringlet.compressors.states.units import factor_among, in_gradient


def own(state: State, compressor: Compressor) -> State:
    """Return what of ``state`` is this rank's own, and in units of its gradient.

    A residual is float32, whatever it is held as; other arrays are those of ``state``.
    """
    found = plain(state)
    rows = {"rows": found["rows"]} if "rows" in found and feeds_back(compressor) else {}
    return compressor.regrouped(found) | rows


def owed(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float = 1.0
) -> State:
    """Return this rank's ``own``, with what it holds back of its shards and their sums in it.

    What is of sums is owed once, and may be part of any rank's residual, in whose units it is.
    """
    return own(with_parts(plain(state), compressor, size, average, postscale), compressor)


def of_gradient(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float = 1.0
) -> Any:
    """Return what is ``owed`` in units of this rank's gradient, flat; None where nothing is."""
    found = next(held_back(owed(state, compressor, size, average, postscale)), None)
    unit = in_gradient(compressor, size, average, postscale)
    return None if found is None else found * np.float32(unit)


def rows_to_residual(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float = 1.0
) -> None:
    """Let what is held back of a table's rows go on in the residual: its gradient is dense now."""
    if "rows" not in state or not feeds_back(compressor):
        return
    widen(state)
    unit = in_gradient(compressor, size, average, postscale)
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
    if state.keys() <= {"step", "rows"} or not feeds_back(compressor):
        return
    held = of_gradient(state, compressor, size, average, postscale)
    if held is None or held.size != math.prod(shape):
        return
    rows = held.reshape(shape)
    for part in held_parts(state, compressor, size, average, postscale):
        forget(part.state)
    forget(state)
    known = state.get("rows")
    state["rows"] = rows if known is None else known + rows


def whole_residual(compressor: Compressor, ctx: Context) -> Any:
    """Return error feedback's residual of a whole tensor, float32 from now on; None for none.

    Raises CompressorError where it is broken, or of another size than ``ctx.numel``.
    """
    if not feeds_back(compressor):
        return None
    widen(ctx.state)
    residual = ctx.state.get("residual")
    if residual is not None:
        check(residual, ctx.numel, ctx)
    return residual


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
    kept, parts = own(state, compressor), held_parts(state, compressor, before, average, postscale)
    state.clear()
    state |= step
    for name, array in kept.items():
        unit = factor_among(name, compressor, before, after, average, owed)
        state[name] = array if unit == 1.0 else array * np.float32(unit)
    if parts:
        where = "residual", compressor, before, after, average
        factors = [factor_among(*where, owed or part.of_sum) for part in parts]
        state["residual"] = added(state.get("residual"), parts, factors)


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
        more = array * np.float32(factor_among(name, compressor, before, after, average, owed=True))
        if name not in state:
            state[name] = more
        elif np.shape(state[name]) == more.shape:
            state[name] = state[name] + more


def reclaim(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float,
    gone: Callable[[str], bool],
) -> None:  # fmt: skip
    """Remove the states of parts of the tensor, by key, that are ``gone``.

    What error feedback holds back in them goes on in the residual, if need be a new one.
    """
    parts = {key: state.pop(key) for key in [key for key in state if gone(key)]}
    if not parts or not feeds_back(compressor) or not postscale or broken(state):
        return
    widen(state)
    known = state.get("residual")
    whole = parts if known is None else parts | {"residual": known}
    if found := held_parts(whole, compressor, size, average, postscale):
        state["residual"] = added(known, found)


def reorder(state: State, compressor: Compressor, index: Any, size: int) -> list[str]:
    """Let ``state`` be of a tensor whose elements are those at ``index``, in that order.

    Keeps the step and what is this rank's own, if it is as long as the tensor, with what it holds
    back of shards and sums in it; returns the names of what is forgotten. Gradients are averaged
    over ``size`` ranks, of which none has predivided. Arrays are NumPy's.
    """
    held = owed(state, compressor, size, average=True)
    kept = {name: a[index] for name, a in held.items() if np.shape(a) == np.shape(index)}
    if "residual" in kept:
        for each in (
            state,
            *(part.state for part in held_parts(state, compressor, size, True, 1.0)),
        ):
            forget(each)
    others = state.keys() - kept.keys() - {"step"}
    lost = sorted(name for name in others if not bare({name: state[name]}))
    step = {"step": state["step"]} if "step" in state else {}
    state.clear()
    state |= step | kept
    return lost
