"""Which network interface a job uses on a host, and the names under which transports ask for it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import address_of
from ringlet.ring.wire.addresses import family_of, interface_address, own_address

# gloo, NCCL, MPICH's UCX, its libfabric and Open MPI each have a name of their own for it.
_NAMES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "FI_TCP_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
)
LOOPBACK = "lo"


def network(interfaces: Sequence[str], address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank should find in its environment about this host's network.

    The first of ``interfaces`` that is here is used; none given means the one with ``address``,
    by which this host reaches the launcher; if that is loopback, transports stay there too. What
    ``env`` says already is the user's. Raises LaunchError when none of them is here.
    """
    if interfaces:
        name, address = find_interface(interfaces, address)
        own = {"RINGLET_IFACE": name, "RINGLET_ADDRESS": address}
    elif address == "127.0.0.1":
        name, own = LOOPBACK, {"RINGLET_ADDRESS": address}
    else:
        return {"RINGLET_ADDRESS": address}
    return {variable: name for variable in _NAMES if variable not in env} | own


def find_interface(interfaces: Sequence[str], like: str | None = None) -> tuple[str, str]:
    """Return the first of ``interfaces`` that this host has, and its address.

    If it has several, that is one of the family of the address ``like``, or of IPv4.
    """
    for name in interfaces:
        with contextlib.suppress(OSError):
            return name, interface_address(name, like)
    here = ", ".join(name for _, name in socket.if_nameindex())
    raise LaunchError(
        f"host {socket.gethostname()} has no network interface {' or '.join(interfaces)} with an"
        f" address that other hosts can reach; it has {here}"
    )


def launcher_address(interfaces: Sequence[str], others: Sequence[str]) -> str:
    """Return the address of this host at which the hosts ``others`` can reach the launcher.

    That of one of ``interfaces`` if any are given, else the one that packets to the first host
    whose name can be resolved would leave from. Raises LaunchError when there is none.
    """
    known = [(name, address) for name in others if (address := address_of(name))]
    if interfaces:
        return find_interface(interfaces, known[0][1] if known else None)[1]
    for name, address in known:
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing: it only finds the route
            except OSError as error:
                raise LaunchError(
                    f"there is no route to host {name} ({address}): {error}"
                ) from error
            return str(probe.getsockname()[0])
    return own_address()
