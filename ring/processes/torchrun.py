"""What scripts written for torchrun look for: rank, size, and where ``init_process_group`` meets.

torch's rank 0 listens on MASTER_PORT itself, so nothing else may, and the port has to be known to
every rank before the first one starts: the wrapper of rank 0 chooses it, on the host where it is.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Seat

PLACE = ("MASTER_ADDR", "MASTER_PORT")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *PLACE)

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10000  # below, services have ports by custom
_ENOUGH = 1000  # ports to choose from
_TRIES = 200


def users_own(env: Mapping[str, str], asked: Collection[str] = ()) -> dict[str, str]:
    """Return those of these variables in ``env`` that stay as they are, for every rank.

    These are the ones ``asked`` for by name, and a meeting place, unless it comes with RANK and
    WORLD_SIZE: then another launcher, around this one, has left it.
    """
    around = {name for name in ("RANK", "WORLD_SIZE") if name in env and name not in asked}
    kept = [name for name in NAMES if name in asked or (name in PLACE and len(around) < 2)]
    return {name: env[name] for name in kept if name in env}


def torch_environment(rank: int, size: int, seat: Seat, users: Mapping[str, str]) -> dict[str, str]:
    """Return what rank ``rank`` finds besides the meeting place; ``users`` have precedence."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
    } | dict(users)


def meeting_place(address: str) -> dict[str, str]:
    """Return the variables that let rank 0 listen on this host, which others reach at ``address``.

    Raises LaunchError when no port is free.
    """
    return dict(zip(PLACE, (address, str(free_port())), strict=True))


def free_port() -> int:
    """Return a port that is free now, and that the kernel gives nobody who leaves the choice to it.

    So no connection and no listener of our own can take it before the program comes to it. Raises
    LaunchError when none is found.
    """
    ports: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _RANGE.read_text().split())
        ports = [*range(_LOWEST, first), *range(max(_LOWEST, last + 1), 65536)]
    if len(ports) < _ENOUGH:
        ports = list(range(_LOWEST, 65536))
    for port in random.sample(ports, min(_TRIES, len(ports))):
        if _free(port):
            return port
    raise LaunchError(
        f"host {socket.gethostname()} has no free port for MASTER_PORT: {_TRIES} between"
        f" {_LOWEST} and 65535 were tried; set MASTER_PORT"
    )


def _free(port: int) -> bool:
    """Whether ``port`` can be bound at every address, of IPv6 too where there is any."""
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # this kernel does without the family
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((everywhere, port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is there, and switched off
                    return False
    return True
