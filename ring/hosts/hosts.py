"""Which host runs which rank: ``host1:4,host2:4``, hostfiles, and where the names lead."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringlet.ring.errors import LaunchError
from ringlet.ring.wire.addresses import addresses_of, family_of

# user@host, where the host may be an IPv6 address in brackets, maybe with its interface. Neither
# begins with -, which remote shells would take for an option.
_WORD = r"[A-Za-z0-9_.][A-Za-z0-9_.-]*"
_NAME = rf"(?:{_WORD}@)?(?:\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]|{_WORD})"
_ENTRY = re.compile(rf"({_NAME})(?::([0-9]{{1,6}}))?")
_SLOTS = re.compile(r"([A-Za-z-]+)\s*=\s*(\S+)")

# Addresses that are for documents alone.
_NOBODYS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}

MOST = 4096  # ranks of a host, where nobody says how many ranks there are


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class Seat:
    """Where one rank runs: the name of its host, and its place among the ranks there."""

    host: str
    local_rank: int
    local_size: int


def parse_hosts(text: str, source: str = "--hosts") -> list[Host]:
    """Read ``host1:4,host2:4``; a host without a number has one slot. Raises LaunchError."""
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        if len(apart := piece.split()) > 1:
            raise LaunchError(
                f"{source}: expected host:slots, not {piece!r}; commas stand between hosts: "
                f"{','.join(apart)}"
            )
    return _distinct([parse_host(piece, source) for piece in pieces], source)


def read_hostfile(path: str) -> list[Host]:
    """Read a file with a host a line: ``host slots=4`` or ``host:4``; # begins a comment.

    Raises LaunchError naming the line that is wrong.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path} cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        source = f"{path}, line {number}"
        words = line.partition("#")[0].split(None, 1)
        if not words:
            continue
        if len(words) == 1:
            hosts.append(parse_host(words[0], source))
            continue
        given = _SLOTS.fullmatch(words[1].strip())
        if not given or given[1] != "slots" or not given[2].isdecimal():
            raise LaunchError(f"{source}: expected `host slots=4` or `host:4`, not {line!r}")
        hosts.append(parse_host(f"{words[0]}:{given[2]}", source))
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host")
    return _distinct(hosts, path)


def chosen_hosts(text: str | None, path: str | None) -> list[Host]:
    """Return the hosts that --hosts or --hostfile name, none if neither is given."""
    if text is not None and path is not None:
        raise LaunchError("give --hosts or --hostfile, not both")
    if text is not None:
        return parse_hosts(text)
    return [] if path is None else read_hostfile(path)


def seat(hosts: Sequence[Host], np: int) -> list[Seat]:
    """Give ``np`` ranks their seats, host after host. Raises LaunchError if there are too few."""
    slots = sum(host.slots for host in hosts)
    if np > slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {np} needs {np} slots, but the hosts have {slots}: {listed}; HOST:SLOTS says how "
            "many ranks a host takes"
        )
    seats: list[Seat] = []
    for host in hosts:
        taken = min(host.slots, np - len(seats))
        seats.extend(Seat(host.name, local, taken) for local in range(taken))
    return seats


def is_here(name: str, resolve: bool = True) -> bool:
    """Whether ``name`` is this host; with ``resolve`` also by its address."""
    own = socket.gethostname()
    if name in ("localhost", "127.0.0.1", "[::1]", own, own.partition(".")[0]):
        return True
    address = address_of(name) if resolve else None
    return address is not None and _is_own(address)


def _is_own(address: str) -> bool:
    """Whether an address is one of this host's."""
    family = family_of(address)
    if not _can_be_bound(address):
        return False
    if not _can_be_bound(_NOBODYS[family]):
        return True
    # Any can, where net.ipv4.ip_nonlocal_bind is set: a host sends to itself from the very address.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only finds the route
        except OSError:
            return False
        source = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    return source.is_loopback or source == ipaddress.ip_address(address.partition("%")[0])


def _can_be_bound(address: str) -> bool:
    try:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_of(name: str) -> str | None:
    """Return the address of a host, or None if its name is known to the remote shell only."""
    return next(iter(addresses_of(bare(name).rpartition("@")[2])), None)


def bare(name: str) -> str:
    """Return the name of a host as remote shells take it: an IPv6 address without brackets."""
    return name.replace("[", "").replace("]", "")


def parse_host(text: str, source: str, slots: int = 1) -> Host:
    """Read ``host`` or ``host:slots``; ``slots`` are those of a host without a number.

    Raises LaunchError, which names the ``source``.
    """
    found = _ENTRY.fullmatch(text)
    if not found:
        hint = " (an IPv6 address needs brackets, as in [::1]:4)" if text.count(":") > 1 else ""
        raise LaunchError(f"{source}: expected host:slots, not {text!r}{hint}")
    slots = int(found[2]) if found[2] is not None else slots
    if slots < 1:
        raise LaunchError(f"{source}: host {found[1]} has no slots")
    return Host(found[1], slots)


def check_all_slots(hosts: Sequence[Host], source: str) -> None:
    """Raise LaunchError where all slots are to be used, and a host has so many that none is meant.

    A port may have been written where slots belong.
    """
    for host in hosts:
        if host.slots > MOST:
            raise LaunchError(
                f"{source}: host {host.name} has {host.slots} slots, and each would get a rank:"
                " behind the colon stands how many ranks a host takes, and no port"
            )


def _distinct(hosts: list[Host], source: str) -> list[Host]:
    names = [host.name for host in hosts]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise LaunchError(f"{source}: host {repeated} is named twice; add its slots up")
    return hosts
