"""Ranks that ``jax.distributed`` has brought together: they find each other by its service."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from ringlet.job.lifecycle import init as start
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import Runtime, is_initialized
from ringlet.ring.callers import public
from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import LaunchError, unavailable
from ringlet.ring.rendezvous.connect import TIMEOUT, loopback
from ringlet.ring.rendezvous.environment import Launched, detect
from ringlet.ring.rendezvous.exit_hooks import leave_on_exception
from ringlet.ring.transports.local import this_thread
from ringlet.ring.wire.addresses import listen
from ringlet.ring.wire.keys import job_key

_meetings = count(1)  # ranks call init equally often


@public
def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    transport: str | None = None,
    autotune: bool | str | None = None,
    join_divisor: str | None = None,
) -> Runtime:
    """Join the job that a launcher started, or ``jax.distributed``; see ``ringlet.torch.init``.

    Without a launcher's variables the processes of ``jax.distributed.initialize``, called before
    this, are the ranks, over gloo, by their process ids. Raises LaunchError where a launcher and
    ``jax.distributed`` number the processes differently, or another transport is asked for.
    """
    if comm is None and this_thread() is None and not is_initialized():
        comm = _connected(transport)
    return start(comm, process_sets, transport, autotune, join_divisor)


def _connected(transport: str | None) -> Communicator | None:
    """Return a communicator among the processes of ``jax.distributed``.

    None where it was not begun, or has one process, or a launcher says where ranks meet.
    """
    from jax._src.distributed import global_state  # nothing public tells its client

    if global_state.client is None or global_state.num_processes == 1:
        return None
    launched = detect(os.environ)
    rank, size = global_state.process_id, global_state.num_processes
    if launched.launcher != "none":
        if (launched.rank, launched.size) != (rank, size):
            raise LaunchError(_differs(launched, rank, size))
        return None
    asked = transport or os.environ.get("RINGLET_TRANSPORT") or "gloo"
    if asked != "gloo":
        raise LaunchError(
            f"the ranks of jax.distributed meet over gloo, not {asked!r}: start them with `ringlet "
            f"run --transport {asked}`, or leave the transport out"
        )
    return _meet(global_state.client, global_state.coordinator_address, rank, size)


def _meet(client: Any, coordinator: str, rank: int, size: int) -> Communicator:
    try:
        dist: Any = import_module("torch.distributed")
    except ModuleNotFoundError as error:
        raise unavailable("gloo", str(error), "pip install 'ringlet[torch]'") from error
    from ringlet.ring.transports.gloo import GlooCommunicator

    address, patience = f"tcp://{coordinator}", timedelta(seconds=TIMEOUT)
    host, key = urlsplit(address).hostname, f"ringlet/meeting/{next(_meetings)}"
    if rank == 0:  # jax.distributed's service is on this host, at an address that all know
        store = _serve(dist, host, size, patience)
        client.key_value_set(key, str(store.port))
    else:
        port = int(client.blocking_key_value_get(key, int(TIMEOUT * 1000)))
        store = dist.TCPStore(host, port, size, False, patience)
    leave_on_exception(always=False)
    return GlooCommunicator(
        store,
        rank,
        size,
        timeout=TIMEOUT,
        host=loopback(address, os.environ),
        key=job_key(os.environ),
    )


def _serve(dist: Any, host: str | None, size: int, patience: timedelta) -> Any:
    """Keep the store: on the one address by which all know this host, where they know one.

    By itself torch listens on all of them. A name may stand for another address on other hosts.
    """
    address, given = "127.0.0.1" if host == "localhost" else host or "", {}
    with suppress(OSError, ValueError):
        ipaddress.ip_address(address)
        listener = listen(address)  # or this host has it by translation only
        given = {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
    options = {"world_size": size, "is_master": True, "timeout": patience}
    return dist.TCPStore(host, **({"port": 0} | given), **options, wait_for_workers=False)


def _differs(launched: Launched, rank: int, size: int) -> str:
    return (
        f"the launcher ({launched.launcher}) says rank {launched.rank} of {launched.size}, "
        f"jax.distributed says process {rank} of {size}: pass jax.distributed.initialize "
        f"num_processes={launched.size} and process_id={launched.rank} there, or start the "
        "processes without that launcher"
    )
