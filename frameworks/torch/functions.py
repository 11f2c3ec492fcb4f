"""Functions that make replicas start alike."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ringlet.runtime import current
from ringlet.torch.ops import Handle, broadcast_, broadcast_async_


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
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Overwrite the optimizer's state and hyper-parameters with those of ``root_rank``.

    Compressors' residuals are not part of it: they belong to each rank. State travels in torch's
    own format and is read without executing anything (``weights_only``).
    """
    runtime = current()
    if runtime.size == 1:
        return
    data = b""
    if runtime.rank == root_rank:
        stream = io.BytesIO()
        torch.save(optimizer.state_dict(), stream)
        data = stream.getvalue()
    length = torch.tensor([len(data)], dtype=torch.int64)
    broadcast_(length, root_rank, "broadcast_optimizer_state.length")
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if data:
        buffer = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    broadcast_(buffer, root_rank, "broadcast_optimizer_state.data")
    if runtime.rank != root_rank:
        received = io.BytesIO(buffer.numpy().tobytes())
        optimizer.load_state_dict(torch.load(received, weights_only=True))
