"""What a rank's compressors remember, as part of a checkpoint.

It is a store of its own, by parameter name: inside ``optimizer.state[p]`` it would keep Adam from
initialising its moments, and be cast to the parameter's dtype when loaded. Arrays on a GPU are
saved as ones in host memory, and restored there; the engine brings them back.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ringlet.compressors import Compressor, ErrorFeedback, Modifier
from ringlet.compressors.context import State
from ringlet.ring.communicator import ReduceOp

VERSION = 1
# Of error feedback, momentum correction, and EF21 with its second stage.
_IN_UNITS = {"residual", "u", "v", "worker", "server", "known", "sum"}


def saved(states: Mapping[str, State], rank: int, size: int, step: int) -> dict[str, Any]:
    """Return a copy of ``states`` made of tensors and numbers, for ``torch.save``."""
    plain = {name: _to_tensors(state) for name, state in states.items() if state}
    return {"version": VERSION, "rank": rank, "size": size, "step": step, "states": plain}


def restore(
    states: Mapping[str, State], given: Mapping[str, Any] | None, rank: int, size: int
) -> int:
    """Overwrite ``states`` with what this rank saved; return the step.

    Warns, and resets residuals, where ``given`` is missing or another rank's: a checkpoint that
    rank 0 wrote alone holds rank 0's residuals only.
    """
    own = given is not None and given["rank"] == rank and given["size"] == size
    if not own and (given is not None or any(states.values())):
        whose = (
            "holds no residuals"
            if given is None
            else f"holds the residuals of rank {given['rank']} of {given['size']}"
        )
        warnings.warn(
            f"the checkpoint {whose}, this is rank {rank} of {size}: what compression held back "
            "is lost. Save and load optimizer.state_dict() on every rank, or pass all ranks' "
            "state_dicts to optimizer.load_sharded()",
            stacklevel=4,
        )
    saved_states = given["states"] if given is not None and own else {}
    for name, state in states.items():
        _replace(state, _to_arrays(saved_states.get(name, {})))
    step = 0 if given is None else int(given["step"])
    for state in states.values():
        if given is not None and not own:
            state["step"] = step
    return step


def reshard(
    states: Mapping[str, State], shards: Sequence[Mapping[str, Any]], rank: int, size: int
) -> int:
    """Overwrite ``states`` from what all ranks of an earlier job saved; return the step.

    Where the number of ranks has changed, every rank holds the mean of the old residuals, so that
    averages go on as before; what else compressors remembered is forgotten, and what was held back
    of sums and, over two levels, of shards. Raises ValueError
    unless every rank's part is there once.
    """
    sizes = {int(shard["size"]) for shard in shards}
    ranks = sorted(int(shard["rank"]) for shard in shards)
    if len(sizes) != 1 or ranks != list(range(sizes.pop() if sizes else 0)):
        raise ValueError(f"load_sharded needs the state of every rank once; got ranks {ranks}")
    by_rank = {int(shard["rank"]): shard for shard in shards}
    if len(shards) == size:
        return restore(states, by_rank[rank], rank, size)
    step = max(int(shard["step"]) for shard in shards)
    for name, state in states.items():
        _replace(state, {})
        state["step"] = step
        parts = [shard["states"].get(name, {}).get("residual") for shard in by_rank.values()]
        kept = [part.double() for part in parts if isinstance(part, torch.Tensor)]
        if kept:
            mean = torch.stack(kept).sum(0) / len(shards)
            state["residual"] = mean.float().numpy()
    return step


def rescale(state: State, factor: float) -> None:
    """Multiply what ``state`` remembers in units of gradients: residuals, momenta, estimates."""
    for key, value in state.items():
        if isinstance(value, dict):
            rescale(value, factor)
        elif key in _IN_UNITS:
            value *= np.float32(factor)


def norm(states: Mapping[str, State]) -> float:
    """Return the Euclidean norm of all residuals."""
    return math.sqrt(sum(_energy(state) for state in states.values()))


def _replace(state: State, given: State) -> None:
    """Make ``state`` equal to ``given``; dicts in it stay the same objects, for they are in use."""
    for key in state.keys() - given.keys():
        if isinstance(state[key], dict):
            _replace(state[key], {})
        else:
            del state[key]
    for key, value in given.items():
        if isinstance(value, dict):
            _replace(state.setdefault(key, {}), value)
        else:
            state[key] = value


def _energy(state: State) -> float:
    total = 0.0
    for key, value in state.items():
        if isinstance(value, dict):
            total += _energy(value)
        elif key == "residual":
            wide = value.astype("float64")
            total += float(wide @ wide)
    return total


def _to_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_tensors(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_tensors(inner) for inner in value]
    if hasattr(value, "__cuda_array_interface__"):
        return torch.from_numpy(value.get())
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_arrays(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_arrays(inner) for inner in value]
    return value.numpy().copy() if isinstance(value, torch.Tensor) else value


def carry_over(
    state: State, before: Compressor, after: Compressor, size: int, op: ReduceOp
) -> None:
    """Keep of ``state`` what ``after`` can use: the step, and residuals for error feedback.

    Residuals are in units of what is compressed, which is the gradient, or its share of the mean
    where a compressor divides first.
    """
    kept = {"step"} | ({"residual"} if _feeds_back(before) and _feeds_back(after) else set())
    for key in state.keys() - kept:
        del state[key]
    if "residual" in state and op is ReduceOp.AVERAGE:
        factor = 1.0
        factor *= size if before.traits().predivide else 1
        factor /= size if after.traits().predivide else 1
        if factor != 1.0:
            state["residual"] *= np.float32(factor)


def _feeds_back(compressor: Compressor | None) -> bool:
    """Whether error feedback keeps its residual at the top of the state."""
    while isinstance(compressor, Modifier):
        if type(compressor) is ErrorFeedback:
            return True
        compressor = compressor.inner
    return False
