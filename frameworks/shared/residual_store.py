"""What a rank's compressors remember, as bytes for a checkpoint: arrays and numbers, no code."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringlet.compressors import Router
from ringlet.compressors.context import State
from ringlet.compressors.states import fit
from ringlet.ring.dtypes import Array

VERSION = 1


def dumps(states: Mapping[str, State], rank: int, size: int, step: int, router: Router) -> bytes:
    """Return ``states``, and the specs that they are of, in NumPy's ``npz`` format."""
    arrays: dict[str, Array] = {}
    plain = {name: _emptied(state, arrays) for name, state in states.items() if state}
    specs = {name: str(router(name)) for name in plain}
    head = {
        "version": VERSION, "rank": rank, "size": size, "step": step, "states": plain,
        "specs": specs,
    }  # fmt: skip
    stream = io.BytesIO()
    encoded = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(stream, allow_pickle=False, head=encoded, **arrays)
    return stream.getvalue()


def loads(
    data: bytes, rank: int, size: int, router: Router, average: bool = True
) -> tuple[dict[str, State], int]:
    """Return the states and the step that ``dumps`` wrote.

    States are empty, with a warning, where ``data`` is another rank's: residuals belong to the
    gradients of one rank. What compressors of other specs remembered is forgotten, with a warning,
    but for what those of ``router`` can go on with. Raises ValueError for bytes that are no such
    checkpoint.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        head = json.loads(arrays.pop("head").tobytes())
        version = head["version"]
    except Exception as error:
        raise ValueError(f"these bytes hold no compressor state: {error}") from error
    if version != VERSION:
        raise ValueError(f"compressor state of version {version} needs another Ringlet")
    if (head["rank"], head["size"]) != (rank, size):
        warnings.warn(
            f"the checkpoint holds the residuals of rank {head['rank']} of {head['size']}, this is "
            f"rank {rank} of {size}: what compression held back is lost. Save and restore "
            "compressor state on every rank",
            stacklevel=3,
        )
        return {}, int(head["step"])
    states = {name: _filled(state, arrays) for name, state in head["states"].items()}
    specs, strange = head.get("specs", {}), []
    for name, state in states.items():
        told = fit(state, specs.get(name), router(name), None, size, average)
        strange += [f"{name!r} {what}" for what in told]
    if strange:
        warnings.warn(
            "what compressors remember in the checkpoint does not fit this job everywhere: "
            f"{'; '.join(strange)}",
            stacklevel=3,
        )
    return states, head["step"]


def replace(states: dict[str, State], given: Mapping[str, State], step: int) -> None:
    """Make ``states`` equal to ``given``; what is not in it starts anew at ``step``."""
    for name in states.keys() | given.keys():
        state = states.setdefault(name, {})
        state.clear()
        state.update(given.get(name, {"step": step}))


def _emptied(value: Any, arrays: dict[str, Array]) -> Any:
    if isinstance(value, dict):
        return {str(key): _emptied(inner, arrays) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_emptied(inner, arrays) for inner in value]
    if isinstance(value, np.ndarray):
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"ringlet.array": name}
    return value.item() if isinstance(value, np.generic) else value


def _filled(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"ringlet.array"}:
            return arrays[value["ringlet.array"]]
        return {key: _filled(inner, arrays) for key, inner in value.items()}
    return [_filled(inner, arrays) for inner in value] if isinstance(value, list) else value
