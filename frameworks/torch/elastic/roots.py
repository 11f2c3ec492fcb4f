"""Whose values all ranks take over once ranks have changed: of a process set, those of a member."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ringlet.job import json_exchange
from ringlet.job.process_sets import InvalidArgument, global_process_set
from ringlet.ring.callers import outside
from ringlet.torch.optimizer.reducer import Reducer


class Roots:
    """The rank whose values of an optimizer, or of a model, are taken over.

    That is rank 0, which has trained all that all ranks train. What the ranks of a process set
    train is of no use on other ranks: there it is as old as the last change of ranks. So it is
    taken over from the first rank that was in the set until now.
    """

    def __init__(self) -> None:
        self._current: set[str] = set()  # names of optimizers whose latest values this rank has

    def find(self, values: Mapping[str, Any], synchronised: bool) -> dict[str, int]:
        """Return the ranks by name of optimizer or model; those left out are rank 0's. Collective.

        ``synchronised``: whether this rank has had the state that ranks agreed on. Raises
        InvalidArgument, on all ranks, where a name stands for other process sets on other ranks.
        """
        reducers = reducers_of(values)
        if not reducers:
            return {}
        own = {name: [r.process_set.ranks, name in self._current] for name, r in reducers.items()}
        told = json_exchange.gather(
            [synchronised, own], "elastic.roots", global_process_set,
            "who trained what", lambda value: _fits(value, own.keys()),
        )  # fmt: skip
        roots: dict[str, int] = {}
        for name, reducer in reducers.items():
            _refuse_other_sets(name, [sets[name][0] for _, sets in told])
            trained = [rank for rank, (_, sets) in enumerate(told) if sets[name][1]]
            if trained:
                roots[name] = trained[0]
            elif any(began for began, _ in told):
                warnings.warn(
                    f"what state.{name} trained in its process set is lost with its ranks: all "
                    "ranks take over rank 0's parameters and state, which are as old as the last "
                    "change of ranks; load a checkpoint. From now on ranks "
                    f"{reducer.process_set.ranks} train it",
                    stacklevel=outside(),
                )
        for name, value in values.items():
            if isinstance(value, torch.nn.Module):
                owned = [roots[who] for who in _trainers(value, reducers) if who in roots]
                roots[name] = owned[0] if owned else 0
        return roots

    def note_all(self, values: Mapping[str, Any]) -> None:
        """Note that all ranks have one state, and have saved it."""
        self._current = set(reducers_of(values))

    def note_own(self, values: Mapping[str, Any]) -> None:
        """Note that this rank has what was trained in the sets that it is in, and no more."""
        reducers = reducers_of(values)
        self._current = {name for name, r in reducers.items() if r.process_set.included()}


def reducers_of(values: Mapping[str, Any]) -> dict[str, Reducer]:
    """Return the reducers of those of ``values`` that are distributed optimizers, by name."""
    found = {name: getattr(value, "_ringlet", None) for name, value in values.items()}
    return {name: reducer for name, reducer in found.items() if isinstance(reducer, Reducer)}


def _trainers(model: torch.nn.Module, reducers: Mapping[str, Reducer]) -> list[str]:
    """Return the names of the optimizers that train parameters of ``model``."""
    own = {id(p) for p in model.parameters()}
    return [
        name
        for name, reducer in reducers.items()
        if not own.isdisjoint(map(id, reducer.parameters.values()))
    ]


def _refuse_other_sets(name: str, sets: list[list[int]]) -> None:
    """Raise InvalidArgument where ``sets``, by rank, are not one."""
    other = next((rank for rank, ranks in enumerate(sets) if ranks != sets[0]), None)
    if other is not None:
        raise InvalidArgument(
            f"state.{name} is an optimizer of the process set {sets[0]} on rank 0, and of "
            f"{sets[other]} on rank {other}: when ranks change, all take over one rank's, and what "
            "the other set has trained would be lost; give each set's model and optimizer a name "
            "of its own in the state, on all ranks"
        )


def _fits(value: Any, names: Any) -> bool:
    """Whether ``value`` is what another rank tells ``find`` of optimizers with these names."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[1], dict)
        and value[1].keys() == names
        and all(isinstance(told, list) and len(told) == 2 for told in value[1].values())
    )
