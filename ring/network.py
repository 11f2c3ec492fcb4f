"""The network addresses of this host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from ringlet.ring.errors import RingError

_SIOCGIFADDR = 0x8915


def own_address() -> str:
    """Return the IPv4 address of this host that other hosts can reach.

    RINGLET_IFACE names an interface; else RINGLET_ADDRESS, which the launcher sets, is it; else
    that of the host's name, or of the first interface that is not loopback. Raises RingError.
    """
    named = os.environ.get("RINGLET_IFACE")
    if named:
        try:
            return interface_address(named)
        except OSError as error:
            raise RingError(f"RINGLET_IFACE={named} has no IPv4 address: {error}") from error
    if given := os.environ.get("RINGLET_ADDRESS"):
        return given
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    for _, interface in socket.if_nameindex():
        with contextlib.suppress(OSError):
            address = interface_address(interface)
            if not address.startswith("127."):
                return address
    raise RingError("this host has no address but loopback: name an interface in RINGLET_IFACE")


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises OSError when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
