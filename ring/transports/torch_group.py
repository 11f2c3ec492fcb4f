"""A torch.distributed process group that exists already, as a communicator.

For hooks inside DDP and FSDP, which run in a job that torch started: ranks, hosts and time limits
are those of the group. Arrays are in host memory, so the group needs a backend for the CPU.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

from ringlet.ring.errors import unavailable
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.transports.process_group import ProcessGroupCommunicator, import_torch
from ringlet.ring.wire.keys import job_key


class TorchCommunicator(ProcessGroupCommunicator):
    """The ranks of ``group`` (a ``torch.distributed.ProcessGroup``; None: the default group).

    ``origin`` holds ranks of the default group. ``close`` leaves the group to its owner. Subsets
    are gloo groups of our own that meet at the default group's store.

    Raises TransportUnavailable when torch.distributed is not initialised, when this process is no
    member of the group, or when the group has no backend for the CPU.
    """

    name = "torch"

    def __init__(self, group: Any = None) -> None:
        torch, dist = import_torch(self.name)
        if not dist.is_initialized():
            remedy = "Call torch.distributed.init_process_group() first."
            raise unavailable("torch", "torch.distributed is not initialised", remedy)
        chosen = dist.group.WORLD if group is None else group
        rank = dist.get_rank(chosen)
        if rank < 0:
            remedy = "Make the communicator on members only."
            raise unavailable("torch", "this process is not in the group", remedy)
        if torch.device("cpu") not in chosen._device_types:
            backend = dist.get_backend(chosen)
            remedy = "Give the group one, such as init_process_group('cpu:gloo,cuda:nccl')."
            raise unavailable("torch", f"the backend {backend} moves no arrays of the CPU", remedy)
        members = dist.get_process_group_ranks(chosen)
        super().__init__(rank, len(members), members)
        self._groups.append(chosen)

    def _subset(self, ranks: list[int]) -> GlooCommunicator | None:
        # Not by new_group: all ranks of the default group would have to call it, or, where members
        # call alone, have made equally many groups before.
        token = self.broadcast_bytes(secrets.token_hex(8).encode() if self.rank == 0 else None)
        if self.rank not in ranks:
            return None
        origin = [self.origin[rank] for rank in ranks]
        return meet(token.decode(), ranks.index(self.rank), origin)

    def _release(self) -> None:
        self._groups.clear()


def meet(token: str, rank: int, origin: Sequence[int]) -> GlooCommunicator:
    """Return a gloo group of our own that meets at the default group's store. Collective.

    ``token`` is the same on its ranks and was not used before; ``origin`` holds their ranks in the
    default group, and ``rank`` is this one's place in it.
    """
    _, dist = import_torch(TorchCommunicator.name)
    store = dist.PrefixStore(f"ringlet/{token}", dist.distributed_c10d._get_default_store())
    return GlooCommunicator(store, rank, len(origin), origin=origin, key=job_key(os.environ))
