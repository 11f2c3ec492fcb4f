"""Functions that make replicas start alike."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ringlet.ring.errors import RingError
from ringlet.runtime import current
from ringlet.torch.handles import Handle
from ringlet.torch.ops import broadcast_, broadcast_async_


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Overwrite parameters on every rank with those of ``root_rank``.

    ``params`` is a ``state_dict()`` or ``named_parameters()``. Raises Mismatch, the same on every
    rank, when names agree but shapes or dtypes do not; entries that are no tensors are left alone.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError("pass model.state_dict() or model.named_parameters(), not a tensor")
    named = dict(params)
    handles: list[Handle] = []
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            handles.append(broadcast_async_(value, root_rank, f"broadcast_parameters.{name}"))
    errors: list[RingError] = []
    for handle in handles:  # all of them: names must not be in flight when this returns
        try:
            handle.wait()
        except RingError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Overwrite the optimizer's state and hyper-parameters with those of ``root_rank``.

    Compressors' residuals are not part of it: they belong to each rank. State travels in torch's
    own format and is read without executing anything (``weights_only``); RingError, the same on
    every rank, when it holds something that this cannot read.
    """
    runtime = current()
    if runtime.size == 1:
        return
    data, problem = b"", b""
    if runtime.rank == root_rank:
        try:
            data = _dumped(optimizer)
            _loaded(data)  # what the root cannot read, the others cannot either
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".encode()
    data = _broadcast_bytes(data, root_rank, "broadcast_optimizer_state")
    problem = _broadcast_bytes(problem, root_rank, "broadcast_optimizer_state.problem")
    if problem:
        raise RingError(
            f"the optimizer state of rank {root_rank} cannot be broadcast: {problem.decode()}"
        )
    # The root too: loading converts values to the parameters' dtype, and must do so everywhere.
    optimizer.load_state_dict(_loaded(data))


def _dumped(optimizer: torch.optim.Optimizer) -> bytes:
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        # A learning rate from NumPy is a number to its owner, and code to an unpickler.
        group.update({k: v.item() for k, v in group.items() if isinstance(v, np.generic)})
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _loaded(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def _broadcast_bytes(data: bytes, root_rank: int, name: str) -> bytes:
    length = broadcast_(torch.tensor([len(data)]), root_rank, f"{name}.length")
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if len(data) == len(buffer):
        buffer = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return broadcast_(buffer, root_rank, f"{name}.data").numpy().tobytes()
