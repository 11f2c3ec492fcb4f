"""Whether replicas of a model hold the same bits on all ranks, in training and when asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ringlet.ring.dtypes import Array
from ringlet.shared.model_agreement import equal_on_all_ranks
from ringlet.torch.ops.entry_points import public
from ringlet.torch.tensors.views import flat

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> Array:
    """Return a sum of the bits of each tensor, in host memory: one pass over it."""
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    result = torch.zeros(len(sums), dtype=torch.int64)
    for device in {each.device for each in sums}:  # one copy from each
        places = [i for i, each in enumerate(sums) if each.device == device]
        result[places] = torch.stack([sums[i] for i in places]).cpu()
    array: Array = result.numpy()
    return array


def _sum_of_bits(p: torch.Tensor) -> torch.Tensor:
    values = p.detach().contiguous().view(-1)
    if values.nbytes % 8:
        return values.view(_BITS[values.element_size()]).sum(dtype=torch.int64)
    if values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    return values.view(torch.int64).sum()  # many times as fast as narrower words


@public
def replicas_equal(params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> bool:
    """Whether ``params`` (a ``state_dict()`` or named parameters) are bit-equal on all ranks.

    Collective, and the same answer on every rank. Raises TypeError for something else, such as the
    model.
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError("pass model.state_dict(), not the model")
    if not isinstance(params, Mapping):
        one = isinstance(params, torch.Tensor) or not isinstance(params, Iterable)
        pairs: list[Any] = [params] if one else list(params)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError("pass model.state_dict() or model.named_parameters()")
        params = pairs
    return equal_on_all_ranks(
        (f"{name}{value.dtype}{tuple(value.shape)}", flat(value.detach().cpu().contiguous()))
        for name, value in dict(params).items()
        if isinstance(value, torch.Tensor)
    )
