"""What ranks have loaded of what compressors remember, which has to be the same kind everywhere.

Horovod's programs load a checkpoint on one rank and broadcast it. What compressors remember is
each rank's own and no part of that: the rank that loaded would go on with it alone, and replicas
would part where ranks have some of it in common (PowerSGD, ACP-SGD, EF21).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from ringlet.job import json_exchange
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.callers import outside
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.torch.optimizer.reducer import Reducer
from ringlet.torch.parameters.checkpoint import ADVICE, Loaded

_SHOWN = 3  # tensors that the warning names


class _Told(NamedTuple):
    """What a rank tells the others."""

    loaded: str | None  # a ``Loaded``; None where the rank reduces nothing
    in_common: list[str]  # tensors of which it remembers something that all ranks must have alike


class _Verdict(NamedTuple):
    """What becomes of it where ranks have not loaded the same."""

    owners: list[int]  # ranks that have loaded what they saved
    without: list[int]  # ranks that have loaded nothing beside these: their residuals are lost
    whole: bool  # whether each has loaded something, and all the same of what they have in common
    forgotten: list[str]  # tensors of which all forget what they have in common, unless ``whole``


def agree_on_loaded(reducer: Reducer | None, process_set: ProcessSet) -> None:
    """Let ranks go on with what they have loaded if all have loaded theirs, or none. Collective.

    Otherwise all forget what they have in common, unless all have loaded that, too; residuals stay
    where they were loaded. The first rank warns of what is lost, but not in an elastic job, where
    newcomers have nothing to load. ``reducer`` is None for an optimizer that is not wrapped.

    ``StepAgreement.compare`` does this behind a step, which fails then, where nobody broadcasts;
    ``DdpState.agree`` before a hook's first bucket.
    """
    name, expected = "broadcast_optimizer_state.loaded", "what a rank has loaded"
    gathered = json_exchange.gather(list(_told(reducer)), name, process_set, expected, _fits)
    ranks = process_set.ranks or range(process_set.size())
    verdict = _verdict({r: _Told(*each) for r, each in zip(ranks, gathered, strict=True)})
    if verdict is None:
        return
    if reducer is not None and not verdict.whole:
        reducer.memory.forget_in_common(reducer.memory.states)
    if current().rank == ranks[0] and not is_elastic():
        _warn(verdict)


def _told(reducer: Reducer | None) -> _Told:
    """Return what this rank tells; from now on it counts as agreed on."""
    if reducer is None or not reducer.included:
        return _Told(None, [])
    told = _Told(reducer.memory.loaded, reducer.memory.in_common())
    reducer.memory.agreed()
    return told


def _verdict(everyone: Mapping[int, _Told]) -> _Verdict | None:
    """Return what becomes of what ranks have told; None where all have loaded theirs, or none."""
    reducing = {rank: told for rank, told in everyone.items() if told.loaded is not None}
    kinds = {told.loaded for told in reducing.values()}
    if len(kinds) < 2:
        return None
    lists = [told.in_common for told in reducing.values()]
    whole = Loaded.NOTHING not in kinds and all(names == lists[0] for names in lists)
    owners = [rank for rank, told in reducing.items() if told.loaded == Loaded.OWN]
    without = [rank for rank, told in reducing.items() if told.loaded == Loaded.NOTHING]
    forgotten = [] if whole else list(dict.fromkeys(name for names in lists for name in names))
    return _Verdict(owners, without if owners else [], whole, forgotten)


def _warn(verdict: _Verdict) -> None:
    """Warn of what is lost, if anything is."""
    owners, without, _, forgotten = verdict
    lost = [f"the residuals of rank(s) {', '.join(map(str, without))} are lost"] if without else []
    if forgotten:
        listed = ", ".join(map(repr, forgotten[:_SHOWN]))
        lost.append(
            "what ranks have in common is forgotten on all, for replicas would part: factors or "
            f"estimates of {listed}"
        )
    if lost:
        whose = f"rank(s) {', '.join(map(str, owners))} alone" if owners else "some ranks alone"
        warnings.warn(
            f"what compressors remember was loaded on {whose}: {'; and '.join(lost)}. {ADVICE}",
            stacklevel=outside(),
        )


def _fits(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and (value[0] is None or value[0] in list(Loaded))
        and isinstance(value[1], list)
        and all(isinstance(name, str) for name in value[1])
    )
