"""Communicators among the ranks of a torch.distributed process group, for GPUs or without.

For jobs that torch started, and hooks inside what torch runs.
"""

from __future__ import annotations

import logging
import secrets
from importlib.util import find_spec
from typing import Any

from ringlet.ring.communicator import Communicator
from ringlet.ring.transports.process_group import import_torch
from ringlet.ring.transports.torch_group import TorchCommunicator, meet
from ringlet.ring.transports.torch_nccl import TorchNcclCommunicator

log = logging.getLogger("ringlet")


def connections(group: Any = None, own: bool = True) -> Communicator:
    """Return a communicator among the ranks of a torch process group. Collective.

    Its connections are its own, so that collectives of ``group`` (None: the default one) may go on,
    unless ``own`` is false: for callers whose turn to use the group it is. Arrays on GPUs go over
    torch's NCCL if that is what ``group`` uses and CuPy is installed on every rank; otherwise there
    is gloo alone, for arrays in host memory, and if some ranks lack what others have, rank 0 warns.
    Raises TransportUnavailable as ``TorchCommunicator`` does.
    """
    torch, dist = import_torch(TorchNcclCommunicator.name)
    chosen = dist.group.WORLD if group is None else group  # None before torch has begun
    if not _moves_gpus(torch, chosen):
        return _of_host(TorchCommunicator(group)) if own else TorchCommunicator(group)
    device = torch.cuda.current_device()
    if torch.device("cpu") in chosen._device_types:
        host = _of_host(TorchCommunicator(chosen))
    else:  # ranks can tell each other where to meet on their GPUs only
        word = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8, device=device)
        members = dist.get_process_group_ranks(chosen)
        dist.broadcast(word, members[0], group=chosen)
        host = meet(bytes(word.tolist()).hex(), dist.get_rank(chosen), members)
    said = host.allgather_bytes(b"" if find_spec("cupy") else b"cupy is not installed")
    lacking = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(said) if text]
    if lacking:
        if host.rank == 0:
            log.warning("tensors on GPUs go through host memory: %s", "; ".join(lacking))
        return host
    return (
        TorchNcclCommunicator.join(host, device)
        if own
        else TorchNcclCommunicator(host, chosen, device)
    )


def _of_host(group: TorchCommunicator) -> Communicator:
    own = group.subset(range(group.size))
    assert own is not None
    return own


def _moves_gpus(torch: Any, group: Any) -> bool:
    """Whether NCCL is what a process group moves GPUs' memory with; not, where it is none."""
    gpu = torch.device("cuda")
    if gpu not in getattr(group, "_device_types", ()):
        return False
    return bool(group._get_backend(gpu).name() == "nccl")
