"""What a rank's compressors remember, as a record for checkpoints, and as bytes: no code in either.

A record holds plain numbers, specs, and arrays in whatever form the framework saves them.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringlet.compressors import Compressor, Router
from ringlet.compressors.core.context import State
from ringlet.compressors.modifiers.residuals import energy
from ringlet.compressors.states import bare, everyones, fit, prescale
from ringlet.ring.callers import outside
from ringlet.ring.dtypes import Array
from ringlet.shared.state_record import VERSION, is_numpy, whole_record

Tensor = tuple[Compressor, int | None]  # what compresses it, and of how many elements it is

PREDIVIDE = "predivide"  # the key of what gradients were divided by before they were compressed

_PASSES = "passes"  # the key of what passes have added up since the last step
_OP = "op"  # the key of that by which gradients are reduced; "" where that is not said
_SHOWN = 8  # tensors that a warning names
_ARRAY = "ringlet.array"  # the key that stands for an array
_ADVICE = "Save and restore compressor state on every rank"


def record(
    states: Mapping[str, State],
    rank: int,
    size: int,
    step: int,
    specs: Mapping[str, str],
    leaf: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return ``states`` that remember something with the specs that they are of, and whose.

    ``leaf`` makes of an array what is saved, and leaves numbers alone.
    """
    plain = {name: mapped(state, leaf) for name, state in states.items() if state}
    return {
        "version": VERSION, "rank": rank, "size": size, "step": step, "states": plain,
        "specs": {name: spec for name, spec in specs.items() if name in plain},
    }  # fmt: skip


def predivided(record: Mapping[str, Any], otherwise: float) -> float:
    """Return by what gradients were divided that a record is of; ``otherwise`` if it is older."""
    said = record.get(PREDIVIDE)
    return float(said) if isinstance(said, int | float) and 0 < said < math.inf else otherwise


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each leaf of its dicts, lists and tuples replaced by ``leaf(it)``."""
    if isinstance(value, dict):
        return {key: mapped(inner, leaf) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(inner, leaf) for inner in value]
    made = leaf(value)
    return made.item() if isinstance(made, np.generic) else made


def put(state: State, given: State) -> None:
    """Make ``state`` equal to ``given``; dicts in it stay the same objects, for they are in use."""
    for key in state.keys() - given.keys():
        if isinstance(state[key], dict):
            put(state[key], {})
        else:
            del state[key]
    for key, value in given.items():
        if isinstance(value, dict):
            held = state.get(key)
            inner = state[key] = held if isinstance(held, dict) else {}
            put(inner, value)
        else:
            state[key] = value


def fit_all(
    found: Mapping[str, State],
    specs: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    size: int,
    average: bool,
    predivide: float = 1.0,
) -> list[str]:
    """Keep of what was ``found`` what fits ``tensors``; return in words what does not."""
    strange = []
    for name, state in found.items():
        if name in tensors:
            compressor, numel = tensors[name]
            told = fit(state, specs.get(name), compressor, numel, size, average, predivide)
            strange += [f"{name!r} {what}" for what in told]
    return strange


def warn_of_misfits(strange: Sequence[str]) -> None:
    """Warn of what is ``strange`` in a checkpoint, if anything is."""
    if not strange:
        return
    more = f"; and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
    warnings.warn(
        "what compressors remember in the checkpoint does not fit this job everywhere: "
        f"{'; '.join(strange[:_SHOWN])}{more}",
        stacklevel=outside(),
    )


def warn_of_strangers(names: Sequence[str]) -> None:
    """Warn that a checkpoint holds what compressors remember of ``names``, which have no gradient.

    Does nothing where there are none.
    """
    if names:
        warnings.warn(
            f"the checkpoint holds what compressors remember of {listed(list(map(repr, names)))}, "
            "and the first step after it has no gradients of these names: what was held back waits "
            "until there are. Where layers are called otherwise now, give them the names that they "
            "were saved with",
            stacklevel=outside(),
        )


def warn_of_loss(given: Mapping[str, Any] | None, rank: int, size: int, advice: str) -> None:
    """Warn that a checkpoint holds another rank's residuals, or none."""
    whose = (
        "holds no residuals"
        if given is None
        else f"holds the residuals of rank {given['rank']} of {given['size']}"
    )
    warnings.warn(
        f"the checkpoint {whose}, this is rank {rank} of {size}: what compression held back is "
        f"lost. {advice}",
        stacklevel=outside(),
    )


def warn_of_common(names: Sequence[str], advice: str = _ADVICE) -> None:
    """Warn that what ranks have in common of ``names`` is forgotten, for not all have it."""
    if names:
        warnings.warn(
            "what compressors remember was loaded on some ranks alone, or from files of other "
            "steps: what ranks have in common "
            "is forgotten on all, for replicas would part: factors or estimates of "
            f"{listed(list(map(repr, names)))}. {advice}",
            stacklevel=outside(),
        )


def warn_of_other_ranks(path: str, others: Sequence[str], size: int) -> None:
    """Warn that a checkpoint holds the residuals of ``others`` ("rank0of2"), and of none here."""
    ranks = "1 rank" if len(others) == 1 else f"{len(others)} ranks"
    warnings.warn(
        f"the checkpoint {path} holds the residuals of {ranks} ({listed(others)}), this job has "
        f"{size} and finds none of its own: what compression held back is lost. {_ADVICE}, and on "
        "as many ranks",
        stacklevel=outside(),
    )


def listed(names: Sequence[str]) -> str:
    """Return ``names`` for a message, which shows the first ones of many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def remembered(states: Mapping[str, State]) -> bool:
    """Whether there is anything in these states, and in the states in them, but counts of steps."""
    return not all(map(bare, states.values()))


def is_own(given: Mapping[str, Any], rank: int, size: int) -> bool:
    """Whether a record is that of this rank, in a job of as many."""
    return bool(given["rank"] == rank and given["size"] == size)


def norm(states: Mapping[str, State]) -> float:
    """Return the Euclidean norm of all residuals, those of tables' rows among them."""
    return math.sqrt(sum(energy(state) + _energy_of_rows(state) for state in states.values()))


def _energy_of_rows(state: State) -> float:
    rows = np.asarray(state.get("rows", ()), np.float64).reshape(-1)
    return float(rows @ rows)


# -- as bytes -----------------------------------------------------------------------------------


def dumps(
    states: Mapping[str, State],
    rank: int,
    size: int,
    step: int,
    router: Router,
    predivide: float = 1.0,
    op: str = "",
    passes: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """Return ``states``, and the specs that they are of, in NumPy's ``npz`` format.

    They are of gradients divided by ``predivide``, and reduced by ``op``. ``passes`` are records of
    what was added up since the last step.
    """
    arrays: dict[str, Array] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {_ARRAY: name}

    specs = {name: str(router(name)) for name, state in states.items() if state}
    head = record(states, rank, size, step, specs, leaf) | {PREDIVIDE: predivide, _OP: op}
    head[_PASSES] = mapped(list(passes), leaf)
    stream = io.BytesIO()
    encoded = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(stream, allow_pickle=False, head=encoded, **arrays)
    return stream.getvalue()


def specs_in(data: bytes) -> list[str]:
    """Return the specs that the states in these bytes are of, without "none"; [] for others."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            specs = json.loads(archive["head"].tobytes())["specs"].values()
        return sorted({str(spec) for spec in specs} - {"none"})
    except Exception:  # whoever loads them is told what is wrong
        return []


def holds_residuals(path: Path) -> bool:
    """Whether there is anything to lose in a file of what ``dumps`` returned; no array is read."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return remembered(json.loads(archive["head"].tobytes())["states"])
    except Exception:  # no such file, or none that could be gone on with
        return False


def loads(
    data: bytes,
    rank: int,
    size: int,
    router: Router,
    average: bool = True,
    predivide: float = 1.0,
    among: int | None = None,
    op: str = "",
) -> tuple[dict[str, State], int]:
    """Return the states and the step that ``dumps`` wrote.

    They are of gradients that are reduced ``among`` so many of the ``size`` ranks, by default all,
    and divided by ``predivide`` before. Where another ``op`` reduced them all is forgotten but
    steps, with a warning: it is of other results. Where ``data`` is another rank's there is nothing
    in them, with a warning, but the factors of low-rank compressors: residuals belong to the
    gradients of one rank. What compressors of other specs remembered is forgotten, with a warning,
    but for what those of ``router`` can go on with.
    Raises ValueError for bytes that are no such checkpoint.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        head = json.loads(arrays.pop("head").tobytes())
        states = {name: _filled(state, arrays) for name, state in head["states"].items()}
        head = whole_record({**head, "states": states}, is_numpy, "their record")
    except Exception as error:
        told = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"these bytes hold no compressor state: {told}") from error
    states = head["states"]
    then_by = str(head.get(_OP, "")) or op
    if op and then_by != op:
        if remembered(states):
            warn_of_misfits([f"it is of gradients that were reduced by {then_by}, not by {op}"])
        states = {name: {"step": s["step"]} for name, s in states.items() if "step" in s}
        return states, int(head["step"])
    if not is_own(head, rank, size):
        if remembered(states):
            warn_of_loss(head, rank, size, _ADVICE)
        left = {name: everyones(state, router(name)) for name, state in states.items()}
        states = {name: state for name, state in left.items() if not bare(state)}
    tensors = {name: (router(name), None) for name in states}
    then = predivided(head, predivide)
    strange = fit_all(states, head["specs"], tensors, among or size, average, then)
    warn_of_misfits(strange)
    if then != predivide:
        for name, state in states.items():
            prescale(state, router(name), then / predivide)
    return states, int(head["step"])


def passes_in(data: bytes) -> tuple[list[Any] | None, tuple[int, int]]:
    """Return what ``dumps`` was given as ``passes``, and of which rank of how many.

    None where an older Ringlet has saved the bytes. Raises ValueError for what is no such record.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            head = json.loads(archive["head"].tobytes())
            whose = head["rank"], head["size"]
            given = head.get(_PASSES)
            return None if given is None else list(_filled(given, archive)), whose
    except Exception as error:
        raise ValueError(f"these bytes hold no compressor state: {error!r}") from error


def replace(states: dict[str, State], given: Mapping[str, State], step: int) -> None:
    """Make ``states`` equal to ``given``; what is not in it starts anew at ``step``."""
    for name in states.keys() | given.keys():
        put(states.setdefault(name, {}), given.get(name, {"step": step}))


def _filled(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _filled(inner, arrays) for key, inner in value.items()}
    return [_filled(inner, arrays) for inner in value] if isinstance(value, list) else value
