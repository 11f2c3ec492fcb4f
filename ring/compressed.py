"""Allreduce for payloads that cannot be summed as they are.

Two ways, both bit-identical on every rank because a rank's own payload goes through the codec like
everybody else's, and because payloads are summed in rank order everywhere:

- all-gather: every rank receives all payloads and sums them itself. Sends (W-1) payloads.
- scatter-reduce with recompression: rank r receives part r of everybody, sums, encodes the sum
  again and all-gathers it. Sends 2(W-1)/W payloads, at the price of a second rounding.

Encoding comes before (``encode``), so that a codec that fails does so before any byte moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringlet.ring.codec import Codec
from ringlet.ring.communicator import Communicator
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import ProtocolError

Allocate = Callable[[int], Array]


def _allocate(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


@dataclass
class Encoded:
    """This rank's payload of one bucket: ``buffer`` (uint8), and the bytes of each part."""

    buffer: Array
    counts: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(self.counts)


def encode(codec: Codec, allocate: Allocate = _allocate) -> Encoded:
    """Encode every part, one behind the other, into one buffer."""
    buffer = allocate(sum(codec.capacity(part) for part in range(codec.parts)))
    counts: list[int] = []
    start = 0
    for part in range(codec.parts):
        counts.append(codec.encode_into(part, buffer[start:]))
        start += counts[-1]
    return Encoded(buffer[:start], counts)


def allgather_reduce(
    comm: Communicator,
    codec: Codec,
    encoded: Encoded,
    sizes: list[int],
    allocate: Allocate = _allocate,
) -> int:
    """Gather every rank's payload and decode their sum; ``sizes`` are its bytes by rank.

    Returns the bytes this rank sent.
    """
    if sizes[comm.rank] != encoded.nbytes:
        said = sizes[comm.rank]
        raise ProtocolError(
            f"rank {comm.rank} encoded {encoded.nbytes} bytes, but announced {said}"
        )
    received = allocate(sum(sizes))
    comm.allgather(encoded.buffer, received, sizes)
    codec.decode_sum_into(0, _split(received, sizes))
    return (comm.size - 1) * encoded.nbytes


def scatter_reduce(
    comm: Communicator, codec: Codec, encoded: Encoded, allocate: Allocate = _allocate
) -> int:
    """Reduce part r on rank r, encode the sum and gather it. Parts are of fixed size.

    Returns the bytes this rank sent. Raises ProtocolError, before any byte moves if it can, when a
    part does not fill its capacity: the other ranks count on it.
    """
    rank, size = comm.rank, comm.size
    sizes = [codec.capacity(part) for part in range(size)]
    if encoded.counts != sizes:
        raise ProtocolError(f"parts have {encoded.counts} bytes, but fixed sizes are {sizes}")
    mine = sizes[rank]
    received = allocate(mine * size)
    comm.alltoall(encoded.buffer, received, encoded.counts, [mine] * size)
    own = allocate(mine)
    used = codec.decode_sum_encode(rank, _split(received, [mine] * size), own)
    if used != mine:
        raise ProtocolError(f"the sum of part {rank} has {used} bytes, its fixed size is {mine}")
    gathered = allocate(sum(sizes))
    comm.allgather(own, gathered, sizes)
    for part, payload in enumerate(_split(gathered, sizes)):
        codec.decode_into(part, payload)
    return encoded.nbytes - encoded.counts[rank] + (size - 1) * mine


def _split(buffer: Array, sizes: list[int]) -> list[Array]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(buffer[start : start + size])
        start += size
    return pieces
