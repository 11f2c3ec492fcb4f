"""The check behind the first promise: replicas hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringlet.torch.movements import allgather
from ringlet.torch.tensors import flat


def digest(params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> bytes:
    """Return 16 bytes that depend on every name and every bit of the tensors in ``params``."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, value in dict(params).items():
        if isinstance(value, torch.Tensor):
            hashed.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(flat(value.detach().cpu().contiguous()).data)
    return hashed.digest()


def replicas_equal(params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> bool:
    """Whether ``params`` (a ``state_dict()`` or named parameters) are bit-equal on all ranks.

    Collective, and the same answer on every rank.
    """
    own = torch.frombuffer(bytearray(digest(params)), dtype=torch.uint8).reshape(1, -1)
    return bool((allgather(own, "replicas_equal") == own).all())
