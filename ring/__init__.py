"""Collectives between ranks: the communicator contract, its transports, and the launcher.

A ring knows bytes and elements, never compressors or frameworks.
"""

if __name__ != "ringlet.ring":  # a bare `import ring` would make a second copy of every class
    raise ImportError("import this package as ringlet.ring, not as ring")

from typing import TYPE_CHECKING, Any

from ringlet.ring.errors import (
    ExchangeFailed,
    LaunchError,
    Mismatch,
    PeerLost,
    ProtocolError,
    RingError,
    TransportUnavailable,
)

if TYPE_CHECKING:
    from ringlet.ring.communicator import Communicator, ReduceOp, Topology

__all__ = [
    "Communicator",
    "ExchangeFailed",
    "LaunchError",
    "Mismatch",
    "PeerLost",
    "ProtocolError",
    "ReduceOp",
    "RingError",
    "Topology",
    "TransportUnavailable",
]


def __getattr__(name: str) -> Any:
    # Late: these need NumPy, and what starts new ranks, which wait for it, does not.
    if name in ("Communicator", "ReduceOp", "Topology"):
        from importlib import import_module

        return getattr(import_module("ringlet.ring.communicator"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
