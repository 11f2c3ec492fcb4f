"""Functions that make replicas start alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringlet.fusion.requests.handle import wait_all
from ringlet.job import json_exchange
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import RingError
from ringlet.shared.model_agreement import SAME_MODEL, agree, told_alike
from ringlet.torch.ops.entry_points import public
from ringlet.torch.ops.movements import broadcast_async_
from ringlet.torch.optimizer.loaded_memory import agree_on_loaded
from ringlet.torch.parameters.checkpoint import STATE_KEY
from ringlet.torch.tensors.state_trees import assembled, dissected, is_tree, rooms
from ringlet.torch.tensors.views import check, check_whole

_STEPS = "ringlet_steps"

_ONE_ORDER = (
    "an optimizer's state goes by the places of its parameters: make it of the same ones in the "
    "same order on all ranks, such as model.parameters(), and not of a set"
)


@public
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any] | torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters on every rank with those of ``root_rank``.

    ``params`` is a ``state_dict()``, ``named_parameters()``, or ``parameters()``, whose places are
    their names. Raises Mismatch, the same on every rank, when names, shapes or dtypes differ;
    entries that are no tensors are left alone.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError("pass model.state_dict() or model.named_parameters(), not a tensor")
    if isinstance(params, torch.nn.Module):
        raise TypeError("pass model.state_dict(), not the model")
    if not isinstance(params, Iterable):
        raise TypeError(
            f"pass model.state_dict() or model.named_parameters(), not {params!r}, and the "
            "root_rank behind it"
        )
    if not isinstance(params, Mapping):
        params = dict(p if isinstance(p, tuple) else (f"{i}", p) for i, p in enumerate(params))
    named = {name: p for name, p in params.items() if isinstance(p, torch.Tensor)}
    _refuse_passed_over(params, named)
    for name, tensor in named.items():
        check(tensor, f"parameter {name!r}")
        check_whole(tensor, f"parameter {name!r}")
    names = [(name, "") for name in sorted(named)]  # handed in by name, in whatever order
    agree("broadcast_parameters", "broadcast_parameters names", names, process_set, SAME_MODEL)
    wait_all(
        [
            broadcast_async_(value, root_rank, f"broadcast_parameters.{name}", process_set)
            for name, value in named.items()
        ]
    )


def _refuse_passed_over(params: Mapping[Any, Any], named: Mapping[Any, torch.Tensor]) -> None:
    """Raise TypeError where tensors are deeper in ``params``, or none of it is a tensor.

    What else a state_dict holds, such as a module's extra state, is passed over.
    """
    for name, value in params.items():
        within = value.values() if isinstance(value, Mapping) else value
        nested = isinstance(within, Iterable) and not isinstance(within, torch.Tensor | str)
        if nested and any(isinstance(each, torch.Tensor) for each in within):
            raise TypeError(
                f"broadcast_parameters takes tensors by name, and {name!r} is a "
                f"{type(value).__name__} of tensors: pass that one, such as checkpoint['model']; "
                "an optimizer goes to broadcast_optimizer_state"
            )
    if params and not named:
        name, value = next(iter(params.items()))
        raise TypeError(
            f"broadcast_parameters was given no tensor at all ({name!r} is a "
            f"{type(value).__name__}): pass model.state_dict() or model.named_parameters(); an "
            "optimizer goes to broadcast_optimizer_state, other objects to broadcast_object"
        )


@public
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the optimizer's state and hyper-parameters with those of ``root_rank``.

    Compressors' residuals are not part of it: they belong to each rank. Where some ranks alone have
    loaded theirs, what ranks have in common of them is forgotten on all, with a warning. State goes
    by the places of parameters in their groups. Raises Mismatch, the same on every rank, where
    ranks have other shapes in these places, or the same names in another order.

    State travels as JSON and tensors, which are read without executing anything; RingError, the
    same on every rank, when it holds something else (``ringlet.torch.tensors.state_trees``), or
    does not fit into some rank's memory. As in Horovod, parameters of an optimizer that has no
    state yet have gradients afterwards: zeros. ``model`` is accepted for Horovod's sake, and not
    needed.
    """
    given: object = optimizer
    if not isinstance(given, torch.optim.Optimizer):
        kind = "its state_dict()" if isinstance(given, Mapping) else type(given).__name__
        raise TypeError(f"pass the optimizer, not {kind}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast: it depends on a closure")
    runtime = current()
    if process_set.size() == 1:
        _give_gradients(optimizer)
        return
    _agree_on_places(optimizer, process_set)
    reducer = getattr(optimizer, "_ringlet", None)
    agree_on_loaded(reducer, process_set)
    told: dict[str, Any] = {}
    arrays: list[Array] = []
    if runtime.rank == root_rank:
        try:
            tree, arrays = dissected(_state_of(optimizer))
            told = {"state": tree}
        except Exception as error:
            told = {"problem": f"{type(error).__name__}: {error}"}
    name = "broadcast_optimizer_state"
    told = json_exchange.broadcast(
        told, root_rank, name, process_set, "an optimizer's state", _is_state
    )
    if "problem" in told:
        raise RingError(
            f"the optimizer state of rank {root_rank} cannot be broadcast: {told['problem']}"
        )
    lack = ""
    if runtime.rank != root_rank:
        try:
            arrays = rooms(told["state"])
        except MemoryError as error:
            lack = str(error) or type(error).__name__
    _agree_on_room(lack, root_rank, process_set)  # or the others would wait for a rank without
    names = [f"{name}.{i}" for i in range(len(arrays))]
    json_exchange.broadcast_arrays(arrays, names, root_rank, process_set)
    # The root too: loading converts values to the parameters' dtype, and must do so everywhere.
    state = assembled(told["state"], arrays)
    steps = state.pop(_STEPS, None)
    load = getattr(optimizer, "_load_inner", optimizer.load_state_dict)  # residuals stay
    load(state)
    if reducer is not None and steps is not None:
        reducer.declared.align(steps)
    _give_gradients(optimizer)


def _agree_on_room(lack: str, root_rank: int, process_set: ProcessSet) -> None:
    """Raise RingError, on all ranks, where some rank says what it lacks. Collective.

    The root has its state, and so lacks nothing.
    """
    label = "broadcast_optimizer_state.room"
    if told_alike(lack, label, process_set):
        return
    lacks = json_exchange.gather(
        lack, f"{label}.lack", process_set, "a text", lambda told: isinstance(told, str)
    )
    ranks = process_set.ranks or range(len(lacks))
    shown = "; ".join(f"rank {r}: {text}" for r, text in zip(ranks, lacks, strict=True) if text)
    raise RingError(f"the optimizer state of rank {root_rank} has no room on other ranks ({shown})")


def _agree_on_places(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    """Raise Mismatch, on all ranks, unless optimizers hold the same parameters in the same places.

    Names count where ranks have the same ones, in whatever order: a rank that has loaded a file may
    have torch's names of another program.
    """
    what, given = "broadcast_optimizer_state", optimizer.param_groups
    own = dict(getattr(optimizer, "_parameter_names", {}))  # what DistributedOptimizer knows
    if not own and all("param_names" in group for group in given):
        own = {
            p: name
            for group in given
            for p, name in zip(group["params"], group["param_names"], strict=False)
        }
    groups = [group["params"] for group in _groups_of_model(optimizer)]
    placed = {
        p: (f"param.{i}.{j}", f"{[*p.shape]} in group {i}")
        for i, group in enumerate(groups)
        for j, p in enumerate(group)
    }
    items = list(placed.values())
    named = [(own.get(p, name), words) for p, (name, words) in placed.items()]
    if told_alike(sorted(name for name, _ in named), f"{what}.names", process_set):
        items = named
    agree(what, f"{what}.places", items, process_set, _ONE_ORDER)


def _give_gradients(optimizer: torch.optim.Optimizer) -> None:
    # Scripts read them; a sparse gradient, though, would become a dense one.
    if optimizer.state or isinstance(optimizer, torch.optim.SparseAdam):
        return
    for p in (p for group in _groups_of_model(optimizer) for p in group["params"]):
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


def _groups_of_model(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups, with the model's parameters in the place of float32 masters."""
    masters = getattr(optimizer, "_ringlet_masters", None)
    groups = optimizer.param_groups
    found: list[dict[str, Any]] = groups if masters is None else masters.of_model(groups)
    return found


def _is_state(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    return isinstance(value.get("problem"), str) or is_tree(value.get("state", {}))


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state, with the steps that its reducer has counted."""
    state = optimizer.state_dict()
    state.pop(STATE_KEY, None)
    reducer = getattr(optimizer, "_ringlet", None)
    if reducer is not None:
        state[_STEPS] = reducer.declared.steps
    return state
