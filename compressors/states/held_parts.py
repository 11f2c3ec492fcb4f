"""What error feedback holds back of parts of a tensor: of this rank's shards, and of their sums."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import SECOND_STAGE, State
from ringlet.compressors.core.shard_name import ShardName, is_shard
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.modifiers.residuals import plain

_OF_SUM = re.compile(re.escape(SECOND_STAGE) + "(0|[1-9][0-9]{0,17})")
_LOCAL = 1 << 12  # more ranks than a host has, each with a shard of a tensor


def bare(state: State) -> bool:
    """Whether there is nothing in ``state``, and in the states in it, but counts of steps."""
    return all(
        bare(value) if isinstance(value, dict) else key == "step" for key, value in state.items()
    )


def feeds_back(compressor: Compressor | None) -> bool:
    """Whether error feedback keeps its residual at the top of the state."""
    while isinstance(compressor, Modifier):
        if type(compressor) is ErrorFeedback:
            return True
        compressor = compressor.inner
    return False


def without(state: State, kept: set[str]) -> list[str]:
    """Remove all but ``kept`` from ``state``; return the names of what there was to lose."""
    others = sorted(state.keys() - kept)
    return [key for key in others if not bare({key: state.pop(key)})]


class HeldPart(NamedTuple):
    """What error feedback holds back of a part of a tensor of ``numel``, from element ``start`` on.

    Times ``unit`` it is in the units of the tensor's own residual. It is ``held`` in ``state``.
    """

    start: int
    held: Any
    unit: float
    of_sum: bool  # of what all ranks' values add up to, and not of this rank's, or host's
    numel: int
    state: State


def held_parts(
    state: State, compressor: Compressor, size: int, average: bool, postscale: float
) -> list[HeldPart]:
    """Return what error feedback holds back of this rank's shards, and of sums of its shards."""
    if not feeds_back(compressor):
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
            found.append(HeldPart(name.start, held, unit, False, numel, part))
            found += _sums(part, name.start, held.size, 1.0 / share, numel)
    return found


def _sums(state: State, first: int, length: int, unit: float, numel: int) -> list[HeldPart]:
    """Return what is held back of sums of parts of ``length`` elements from ``first`` on."""
    found = []
    for key, part in state.items():
        place = _OF_SUM.fullmatch(key)
        if place is not None and isinstance(part, dict):
            held: Any = plain(part).get("residual")
            start, fits = int(place[1]), len(getattr(held, "shape", ())) == 1
            if fits and start + held.size <= length:
                found.append(HeldPart(first + start, held, unit, True, numel, part))
    return found


def with_parts(
    state: State, compressor: Compressor | None, size: int, average: bool, postscale: float
) -> State:
    """Return ``state``, whose residual is float32, with what it holds back of parts in it."""
    parts = [] if compressor is None else held_parts(state, compressor, size, average, postscale)
    return state | {"residual": added(state.get("residual"), parts)} if parts else state


def added(residual: Any, parts: Sequence[HeldPart], factors: Sequence[float] | None = None) -> Any:
    """Return ``residual``, None for zeros, with ``parts``, each times its factor, added."""
    held, numel = parts[0].held, parts[0].numel
    total = np.zeros_like(held, shape=numel) if residual is None else residual.copy()
    for part, factor in zip(parts, factors or [1.0] * len(parts), strict=True):
        piece = slice(part.start, part.start + part.held.size)
        total[piece] += part.held * np.float32(part.unit * factor)
    return total


def left_in_shards(state: State, compressor: Compressor) -> set[str]:
    """Return the names of what is remembered of shards over two levels beside residuals."""
    left = set[str]()
    for key, part in state.items():
        if is_shard(key) and isinstance(part, dict):
            known = feeds_back(compressor) and ShardName.read(key) is not None
            names = {name for name in plain(part) if not name.startswith(SECOND_STAGE)}
            left |= names - ({"step", "residual"} if known else {"step"})
    return left
