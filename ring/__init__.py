"""Collectives between ranks: the communicator contract, its transports, and the launcher.

A ring knows bytes and elements, never compressors or frameworks.
"""

if __name__ != "ringlet.ring":  # a bare `import ring` would make a second copy of every class
    raise ImportError("import this package as ringlet.ring, not as ring")

from ringlet.ring.communicator import Communicator, ReduceOp, Topology
from ringlet.ring.errors import (
    ExchangeFailed,
    LaunchError,
    Mismatch,
    PeerLost,
    ProtocolError,
    RingError,
    TransportUnavailable,
)

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
