"""What Ray knows of its cluster, as jobs need it: addresses, versions, resources."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.interfaces import find_interface

OLDEST = (2, 51)  # from which on Ray Train V2 is what Ray Train means


def store_host(interfaces: Sequence[str] = ()) -> str:
    """Return the address of this process's node for other nodes. Raises LaunchError."""
    if interfaces:
        return find_interface(interfaces)[1]
    return str(ray.util.get_node_ip_address())


def inside_the_cluster() -> None:
    """Raise LaunchError where workers cannot reach this program."""
    if ray.util.client.ray.is_connected():
        raise LaunchError(
            "this program is outside the cluster (ray://), where workers cannot reach it:"
            " submit it as a job (`ray job submit`), or run it on a node of the cluster"
        )


def check_version() -> None:
    """Raise LaunchError where Ray is too old."""
    numbers = tuple(int(word) for word in ray.__version__.split(".")[:2] if word.isdecimal())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise LaunchError(
            f"Ray {ray.__version__} is too old for ringlet.ray, which needs {oldest} or newer:"
            " pip install -U 'ringlet[ray]'"
        )


def resources() -> str:
    """Return what the cluster has of what ranks take, to be read."""
    found = ray.cluster_resources()
    free = ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    has = [f"{found.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in ("CPU", "GPU")]
    return f"{', '.join(has)} on {nodes} {'node' if nodes == 1 else 'nodes'}"
