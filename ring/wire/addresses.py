"""The network addresses of this host, and of others: IPv4 where there is any, else IPv6."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from ringlet.ring.errors import RingError

_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")
_LINK_LOCAL, _UNUSABLE = 0x20, 0x48  # scope; flags: tentative, or a duplicate


def own_address() -> str:
    """Return the address of this host that other hosts can reach.

    RINGLET_IFACE names an interface; else RINGLET_ADDRESS, which the launcher sets, is it; else
    that of the host's name, or of the first interface that is not loopback. Raises RingError.
    """
    given = os.environ.get("RINGLET_ADDRESS")
    named = os.environ.get("RINGLET_IFACE")
    if named:
        try:
            return interface_address(named, given)
        except OSError as error:
            raise RingError(f"RINGLET_IFACE={named} has no address: {error}") from error
    if given:
        return given
    for address in addresses_of(socket.gethostname()):
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    for _, interface in socket.if_nameindex():
        with contextlib.suppress(OSError):
            address = interface_address(interface)
            if not ipaddress.ip_address(address).is_loopback:
                return address
    raise RingError("this host has no address but loopback: name an interface in RINGLET_IFACE")


def interface_address(interface: str, like: str | None = None) -> str:
    """Return the address of a network interface. Raises OSError when it has none.

    That is the IPv4 one; or, where there is none or ``like`` is an IPv6 address, the IPv6 one,
    which is never link-local: on other hosts that would name another interface.
    """
    found = [find for find in (_ipv4(interface), _ipv6(interface)) if find is not None]
    if like is not None and family_of(like) == socket.AF_INET6:
        found.reverse()
    if not found:
        raise OSError(f"{interface} has no address that other hosts can reach")
    return found[0]


def address_towards(name: str) -> str | None:
    """Return the address of this host that leads to the host ``name``; None if that is unknown."""
    address = next(iter(addresses_of(name)), None)
    if address is None:
        return None
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only finds the route
        return str(probe.getsockname()[0])


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a host, those of IPv4 first; none if its name is unknown here."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    families = (socket.AF_INET, socket.AF_INET6)
    return [str(entry[4][0]) for family in families for entry in found if entry[0] == family]


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def with_port(address: str, port: int) -> str:
    """Return ``127.0.0.1:80`` or ``[::1]:80``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split_port(text: str) -> tuple[str, int]:
    """Return address and port of what ``with_port`` made."""
    address, _, port = text.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), int(port)


def listen(address: str, backlog: int = 1024, port: int = 0) -> socket.socket:
    """Listen on ``address`` (never on all of them) at ``port``; 0: one that the system chooses."""
    try:
        return socket.create_server((address, port), family=family_of(address), backlog=backlog)
    except OSError as error:  # whose text repeats what whoever asks for it says
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error


def _ipv4(interface: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
    return None


def _ipv6(interface: str) -> str | None:
    with contextlib.suppress(OSError):  # there is no such file where there is no IPv6
        for line in _IPV6.read_text().splitlines():
            digits, _, _, scope, flags, name = line.split()
            usable = int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _UNUSABLE
            if name == interface and usable:
                return str(ipaddress.IPv6Address(int(digits, 16)))
    return None
