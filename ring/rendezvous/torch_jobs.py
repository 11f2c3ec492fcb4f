"""Joining the ranks of a torch.distributed process group, in a job that torch connected."""

from __future__ import annotations

from typing import Any

from ringlet.ring.communicator import Communicator
from ringlet.ring.rendezvous.exit_hooks import leave_on_exception
from ringlet.ring.transports.torch_subgroups import connections


def connect_group(group: Any = None, own: bool = True) -> Communicator:
    """Return ``connections`` among the ranks of a torch process group. Collective.

    A rank that loses another one leaves as it does after ``connect``, so that the launcher can tell
    cause from effect. Raises TransportUnavailable as ``TorchCommunicator`` does.
    """
    comm = connections(group, own)
    if comm.size > 1:
        leave_on_exception(always=False)
    return comm
