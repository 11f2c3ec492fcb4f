"""What ranks have loaded of what compressors remember, which has to be the same kind everywhere.

Horovod's programs load a checkpoint on one rank and broadcast it. What compressors remember is
each rank's own and no part of that: the rank that loaded would go on with it alone, and replicas
would part where ranks have some of it in common (PowerSGD, ACP-SGD, EF21).
"""

from __future__ import annotations

import warnings
from typing import Any

from ringlet.job import json_exchange
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.callers import outside
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.torch.optimizer.checkpoint import ADVICE, Loaded
from ringlet.torch.optimizer.reducer import Reducer

_SHOWN = 3  # tensors that the warning names


def agree_on_loaded(reducer: Reducer | None, process_set: ProcessSet) -> None:
    """Let ranks go on with what they have loaded if all have loaded theirs, or none. Collective.

    Otherwise all forget what they have in common, unless all have loaded that, too; residuals stay
    where they were loaded. The first rank warns of what is lost, but not in an elastic job, where
    newcomers have nothing to load. ``reducer`` is None for an optimizer that is not wrapped.
    """
    loaded, shared = Loaded.NOTHING, []
    if reducer is not None and reducer.included:
        loaded, shared = reducer.memory.loaded, reducer.memory.in_common()
        reducer.memory.agreed()
    told = [None if reducer is None or not reducer.included else loaded, shared]
    name, expected = "broadcast_optimizer_state.loaded", "what a rank has loaded"
    everyone = json_exchange.gather(told, name, process_set, expected, _fits)
    ranks = process_set.ranks or range(process_set.size())
    found = {rank: each for rank, (each, _) in zip(ranks, everyone, strict=True) if each}
    if len(set(found.values())) < 2:
        return
    common = [names for each, names in everyone if each]
    complete = Loaded.NOTHING not in found.values() and all(n == common[0] for n in common)
    if reducer is not None and not complete:
        reducer.memory.forget_in_common(reducer.memory.states)
    listed_in = [] if complete else common
    names = list(dict.fromkeys(name for names in listed_in for name in names))[:_SHOWN]
    owners = [rank for rank, each in found.items() if each == Loaded.OWN]
    silent = [rank for rank, each in found.items() if each == Loaded.NOTHING] if owners else []
    if is_elastic() or current().rank != ranks[0] or not (names or silent):
        return
    lost = [f"the residuals of rank(s) {', '.join(map(str, silent))} are lost"] if silent else []
    if names:
        listed = ", ".join(map(repr, names))
        lost.append(
            "what ranks have in common is forgotten on all, for replicas would part: factors or "
            f"estimates of {listed}"
        )
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
