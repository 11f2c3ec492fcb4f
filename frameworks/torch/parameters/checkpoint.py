"""What a rank's compressors remember, as part of a checkpoint.

It is a store of its own, by parameter name: inside ``optimizer.state[p]`` it would keep Adam from
initialising its moments, and be cast to the parameter's dtype when loaded. Arrays on a GPU are
saved as ones in host memory, and restored there; the engine brings them back.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.states import bare, everyones, fit, merged, shared
from ringlet.shared.residual_store import (
    Tensor,
    fit_all,
    is_own,
    listed,
    mapped,
    norm,
    put,
    record,
    remembered,
    warn_of_loss,
    warn_of_misfits,
)
from ringlet.shared.state_record import DTYPES, is_numpy, whole_record
from ringlet.torch.parameters.naming import plain, wrapped_in

__all__ = [
    "ADVICE",
    "STATE_KEY",
    "Tensor",
    "check_shards",
    "checksums",
    "every_rank",
    "factors",
    "hooks_record",
    "norm",
    "renamed",
    "reshard",
    "restore",
    "saved",
    "shards_of",
]

STATE_KEY = "ringlet"  # where an optimizer's state_dict keeps what compressors remember
ADVICE = (
    "Save and load optimizer.state_dict() on every rank, or pass all ranks' state_dicts to "
    "optimizer.load_sharded()"
)


class Loaded(StrEnum):
    """What a rank has loaded since ranks agreed last."""

    NOTHING = "nothing"
    OWN = "own"  # what this rank had saved
    OTHER = "other"  # another rank's, of which nothing is used


def saved(
    states: Mapping[str, State],
    rank: int,
    size: int,
    step: int | None = None,
    compressors: Mapping[str, Compressor] | None = None,
) -> dict[str, Any]:
    """Return a copy of ``states`` made of tensors, numbers and specs, for ``torch.save``.

    ``step`` is by default that of the tensor which was compressed most often.
    """
    if step is None:
        step = max((int(state.get("step", 0)) for state in states.values()), default=0)
    specs = {name: str(compressor) for name, compressor in (compressors or {}).items()}
    return record(states, rank, size, step, specs, _tensor)


def restore(
    states: Mapping[str, State],
    given: Mapping[str, Any] | None,
    rank: int,
    size: int,
    tensors: Mapping[str, Tensor] | None = None,
    average: bool = True,
    among: int | None = None,
    predivide: float = 1.0,
    advice: str = ADVICE,
) -> int:
    """Overwrite ``states`` with what this rank saved; return the step.

    Warns, and resets residuals, where ``given`` is missing or another rank's: a checkpoint that
    rank 0 wrote alone holds rank 0's residuals only. Of it others take the factors of low-rank
    compressors, which all ranks have in common. Of EF21's estimates they can not, and rank 0 alone
    goes on with them, which is for the caller to find out: see ``loaded_memory``. Warns, too, of
    what does not fit ``tensors``, which is forgotten. Gradients are reduced ``among`` so many of
    the ``size`` ranks, by default all, and divided by ``predivide`` before.
    """
    own = given is not None and is_own(given, rank, size)
    holds = given is not None and remembered(given["states"])
    if not own and (holds or remembered(states)):
        warn_of_loss(given if holds else None, rank, size, advice)
    saved_states = {}
    if given is not None and own:
        saved_states = given["states"]
    elif given is not None and tensors is not None:
        left = {n: everyones(s, tensors[n][0]) for n, s in given["states"].items() if n in tensors}
        saved_states = {name: state for name, state in left.items() if not bare(state)}
    specs: Mapping[str, str] = {} if given is None else given.get("specs", {})
    found = {name: mapped(saved_states.get(name, {}), _array) for name in states}
    if tensors is not None:
        strange = [f"{name!r} is not in this job" for name in saved_states if name not in states]
        strange += fit_all(found, specs, tensors, among or size, average, predivide)
        warn_of_misfits(strange)
    for name, state in states.items():
        put(state, found[name])
    step = 0 if given is None else int(given["step"])
    if given is not None and not own:  # shared random numbers depend on the count
        for name, state in states.items():
            if name in given["states"]:  # others begin anew where it was saved, too
                state["step"] = int(given["states"][name].get("step", step))
    return step


def reshard(
    states: Mapping[str, State],
    shards: Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    tensors: Mapping[str, Tensor],
    average: bool = True,
    among: int | None = None,
    predivide: float = 1.0,
) -> int:
    """Overwrite ``states`` from what all ranks of an earlier job saved; return the step.

    Where the number of ranks has changed, every rank holds the mean of what is in units of the
    gradient, so that averages go on as before, with what was held back of shards and their sums;
    what else compressors remembered is forgotten. Warns of what does not fit ``tensors``. Raises
    ValueError unless every rank's part is there once, and all are of one step.
    """
    check_shards(shards)
    in_order = sorted(shards, key=lambda shard: int(shard["rank"]))
    if len(shards) == size:
        return restore(states, in_order[rank], rank, size, tensors, average, among, predivide)
    step, strange = max(int(shard["step"]) for shard in shards), []
    specs: dict[str, str] = {}
    for shard in reversed(in_order):  # a rank that remembered nothing names no spec
        specs |= shard.get("specs", {})
    for name, state in states.items():
        compressor, numel = tensors[name]
        parts = [mapped(shard["states"].get(name, {}), _array) for shard in in_order]
        found, told = merged(parts, specs.get(name), compressor, size, average, predivide)
        told += fit(found, None, compressor, numel, size, average)
        strange += [f"{name!r} {what}" for what in told]
        counts = [int(part["step"]) for part in parts if "step" in part]
        put(state, found | {"step": max(counts, default=step)})
    warn_of_misfits(strange)
    return step


def renamed(record: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return what was ``saved`` under ``names``: wrappers may have come, or gone, since then.

    What no name, or more than one, stands for keeps the name that it has.
    """
    listed, kept = list(names), list(record["states"])
    found = {name: [n for n in kept if n == name] for name in listed}
    now, then = wrapped_in(listed), wrapped_in(kept)
    shortened = {name: plain(name, then) for name in kept if name not in found}
    for name in listed:
        if not found[name]:
            found[name] = [n for n, short in shortened.items() if short == plain(name, now)]
    new = {old[0]: name for name, old in found.items() if len(old) == 1}
    parts = {
        key: {new.get(name, name): value for name, value in record[key].items()}
        for key in ("states", "specs", "orders")
        if key in record
    }
    return {**record, **parts}


def checksums(
    states: Mapping[str, State], compressors: Mapping[str, Compressor]
) -> tuple[int, int]:
    """Return 32-bit checksums of what all ranks' ``states`` need alike, or replicas part.

    That is low-rank compressors' factors, and whether there is more that ranks have in common; and
    how often each tensor was compressed.
    """
    factors, held = {}, False
    for name, state in states.items():
        held = held or bool(shared(state, compressors[name]))
        if found := everyones(state, compressors[name]):
            factors[name] = mapped(found, _told)
    kept = factors, held
    steps = {name: step for name, state in states.items() if (step := int(state.get("step", 0)))}
    first, second = (zlib.crc32(json.dumps(x, sort_keys=True).encode()) for x in (kept, steps))
    return first, second


def factors(state: State, compressor: Compressor) -> str:
    """Return a checksum of what ``state`` has for every rank, in hexadecimal digits."""
    told = {k: v for k, v in mapped(everyones(state, compressor), _told).items() if k != "step"}
    return f"{zlib.crc32(json.dumps(told, sort_keys=True).encode()):08x}"


def hooks_record(state: Any) -> Mapping[str, Any]:
    """Return ``state`` in plain dicts. Raises ValueError unless the state of a hook gave it."""
    kept = state.get("states") if isinstance(state, Mapping) else None
    if not isinstance(kept, Mapping) or "step" not in state:
        raise ValueError(
            "no 'states': this is not what state_dict() of the hook's state gave, but perhaps that "
            "of a model or an optimizer"
        )
    return checked(state, "the state")


def checked(record: Any, where: str) -> dict[str, Any]:
    """Return a copy of ``record`` in plain dicts. Raises ValueError unless ``saved`` has made it.

    ``where`` names it in errors.
    """
    return whole_record(record, _is_array, where)


def record_in(state_dict: Any) -> dict[str, Any] | None:
    """Return a copy of the record in an optimizer's ``state_dict``; None where there is none.

    Raises ValueError for one that is damaged, and where ``state_dict`` is something else.
    """
    check_optimizers(state_dict)
    kept = state_dict.get(STATE_KEY)
    return None if kept is None else checked(kept, f"state_dict[{STATE_KEY!r}]")


def check_optimizers(state_dict: Any) -> None:
    """Raise ValueError unless ``state_dict`` looks like what an optimizer gives."""
    known = isinstance(state_dict, Mapping)
    missing = [key for key in ("param_groups", "state") if not known or key not in state_dict]
    if missing:
        kind = "" if known else f" but a {type(state_dict).__name__}"
        raise ValueError(
            f"no {missing[0]!r}: this is not what an optimizer's state_dict() gave{kind}"
        )


def check_tensors(state: Any, parameters: Sequence[torch.Tensor], place: str) -> None:
    """Raise ValueError unless a saved ``state``, at ``place``, is of ``parameters``' shapes.

    For optimizers that remember nothing else, but for the ``step``.
    """
    if not isinstance(state, Mapping) or not all(isinstance(e, Mapping) for e in state.values()):
        raise ValueError(f"{place}['state'] is no dict of dicts: load another checkpoint")
    for key, held in state.items():
        if type(key) is not int or not 0 <= key < len(parameters):
            raise ValueError(f"{place}['state'][{key!r}] is of no parameter of this optimizer")
        wanted = list(parameters[key].shape)
        for name, value in held.items():
            if name == "step" or value is None:
                continue
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if shape != wanted or value.is_meta or value.layout is not torch.strided:
                raise ValueError(
                    f"{place}['state'][{key}][{name!r}] is {shape}, and the parameter of shape "
                    f"{wanted}: load a checkpoint of this model"
                )


def _is_array(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return is_numpy(value)
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
    return plain and value.layout is torch.strided and str(value.dtype)[len("torch.") :] in DTYPES


def every_rank(state_dicts: Any) -> Sequence[Mapping[str, Any]]:
    """Return a list of all ranks' states. Raises ValueError for anything else, such as one."""
    listed = isinstance(state_dicts, Sequence)
    if not listed or not state_dicts or not all(isinstance(each, Mapping) for each in state_dicts):
        kind = "an empty list" if listed and not state_dicts else type(state_dicts).__name__
        raise ValueError(
            "load_sharded takes a list of all ranks' state_dicts, such as [torch.load(file) for "
            f"file in files], not {kind}; for one rank's own there is load_state_dict"
        )
    return state_dicts  # type: ignore[no-any-return]


def check_shards(shards: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless every rank's part is there once, and all are of one step.

    A job that is killed while it saves leaves files of the last checkpoint beside some of this one,
    with which replicas would part. So does one that goes on with fewer ranks.
    """
    saved: dict[int, list[int]] = {}  # ranks, by how many there were
    for shard in shards:
        saved.setdefault(int(shard["size"]), []).append(int(shard["rank"]))
    told = "; ".join(
        f"rank {listed([str(rank) for rank in sorted(saved[size])])} of {size}"
        for size in sorted(saved)
    )
    if len(saved) > 1:
        raise ValueError(
            f"load_sharded needs what all ranks saved at one time, and got {told}, as where a job "
            "of fewer ranks has saved beside the files of more. Pass those of one save alone, and "
            "save each checkpoint into a folder of its own"
        )
    if any(sorted(ranks) != list(range(size)) for size, ranks in saved.items()):
        raise ValueError(f"load_sharded needs the state of every rank once, and got {told}")
    steps: dict[int, list[str]] = {}
    for shard in sorted(shards, key=lambda shard: int(shard["rank"])):
        if shard["states"]:  # else the rank has had no part in these steps
            steps.setdefault(int(shard["step"]), []).append(str(shard["rank"]))
    if len(steps) > 1:
        found = "; ".join(f"step {step}: rank {listed(steps[step])}" for step in sorted(steps))
        raise ValueError(
            f"load_sharded needs what all ranks saved at one step, and got {found}, as where a job "
            "ended while it saved. Load another checkpoint, or the model and the optimizer of one "
            "rank on all, without what compression held back"
        )


def shards_of(
    state_dicts: Sequence[Mapping[str, Any]], rank: int
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """Return the state for ``rank`` without residuals, and all residuals, of what a job saved.

    Raises ValueError where ranks have saved at different steps, and for what is damaged.
    """
    state_dicts = every_rank(state_dicts)
    own = state_dicts[min(rank, len(state_dicts) - 1)]
    shards: list[Mapping[str, Any]] = [
        checked(state[STATE_KEY], f"state_dicts[{i}][{STATE_KEY!r}]")
        for i, state in enumerate(state_dicts)
        if state.get(STATE_KEY) is not None
    ]
    record_in(own)
    if shards:
        check_shards(shards)  # before anything is loaded
    return {key: value for key, value in own.items() if key != STATE_KEY}, shards


def _told(value: Any) -> Any:
    """Return a checksum for an array, and any other value as it is."""
    array = _array(_tensor(value))
    return zlib.crc32(array.tobytes()) if isinstance(array, np.ndarray) else array


def _tensor(value: Any) -> Any:
    if hasattr(value, "__cuda_array_interface__"):
        return torch.from_numpy(value.get())
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _array(value: Any) -> Any:
    # torch.load may have put it on a GPU, and what it was saved from may need a gradient.
    return value.numpy(force=True).copy() if isinstance(value, torch.Tensor) else value
