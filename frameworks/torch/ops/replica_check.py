"""Whether replicas of a model hold the same bits on all ranks, in training and when asked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringlet.fusion.errors import EngineClosed
from ringlet.job.process_sets import ProcessSet
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import PeerLost
from ringlet.shared.model_agreement import equal_on_all_ranks
from ringlet.torch.ops.entry_points import public
from ringlet.torch.ops.handles import TorchHandle
from ringlet.torch.ops.reductions import allreduce_async
from ringlet.torch.tensors.views import flat

log = logging.getLogger("ringlet")


class Comparison:
    """A comparison under way of ``parameters``' bits between ranks.

    Of one sum of bits for each parameter, which costs a pass over them, and 16 bytes each on the
    wire.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], name: str, process_set: ProcessSet
    ) -> None:
        self._names = sorted(parameters)  # ranks may name them in another order
        sums = [_sum_of_bits(parameters[name]) for name in self._names]
        own = torch.zeros(len(sums), dtype=torch.int64)
        for device in {each.device for each in sums}:  # one copy from each
            places = [i for i, each in enumerate(sums) if each.device == device]
            own[places] = torch.stack([sums[i] for i in places]).cpu()
        both = torch.cat([own, ~own])  # whose maximum is that of all, and of all the least
        self._handle: TorchHandle | None = None
        try:
            self._handle = allreduce_async(
                both, name=name, op=ReduceOp.MAX, process_set=process_set
            )
        except (PeerLost, EngineClosed):  # such as one that had no more to do than this step
            log.debug("replicas cannot be compared", exc_info=True)

    def done(self) -> bool:
        """Whether all ranks have taken part, or one has left the job."""
        return self._handle is None or self._handle.done()

    def difference(self) -> str | None:
        """Return a parameter that differs, by name, if there is one: the same on every rank.

        None, too, where a rank has left the job meanwhile. That does not fail the caller's step:
        the next operation that needs the rank says so.
        """
        if self._handle is None:
            return None
        try:
            most, least = self._handle.wait().chunk(2)
        except (PeerLost, EngineClosed):
            log.debug("replicas could not be compared", exc_info=True)
            return None
        odd = (most != ~least).nonzero().flatten().tolist()
        return self._names[odd[0]] if odd else None


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
