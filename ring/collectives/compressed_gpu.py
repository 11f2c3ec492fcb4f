"""Compressed allreduces whose collectives are enqueued and not waited for, as on a GPU.

The ways are those of ``ringlet.ring.collectives.compressed``, and so are the results. There are no
seals, which the host would have to read, and no round in which ranks agree that all is well, which
it would have to wait for: the transport tells what went wrong on the way. A codec that fails
between collectives raises on its rank, whose peers are inside the next collective then and have to
be interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ringlet.ring.collectives.codec import Codec
from ringlet.ring.collectives.compressed import Allocate, Encoded, split
from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import ProtocolError
from ringlet.ring.pipeline import Steps, Wire


def allgather_reduce(
    comm: Communicator, codec: Codec, encoded: Encoded, sizes: Sequence[int], allocate: Allocate
) -> Steps:
    """Gather every rank's payload and decode their sum; ``sizes`` are its bytes by rank.

    All is allocated before the first collective. Raises ProtocolError where this rank's payload
    has not the announced size.
    """
    rank, size = comm.rank, comm.size
    if sizes[rank] != encoded.nbytes:
        raise ProtocolError(
            f"rank {rank} encoded {encoded.nbytes} bytes, but announced {sizes[rank]}"
        )
    received = allocate(sum(sizes))
    sent = (size - 1) * encoded.nbytes
    yield Wire(partial(comm.allgather, encoded.buffer, received, sizes), sent)
    codec.decode_sum_into(0, split(received, sizes))


def scatter_reduce(comm: Communicator, codec: Codec, encoded: Encoded, allocate: Allocate) -> Steps:
    """Reduce part r on rank r, encode the sum and gather it. Parts are of fixed size.

    All is allocated before the first collective. Raises ProtocolError where a part does not fill
    its capacity.
    """
    rank, size = comm.rank, comm.size
    sizes = [codec.capacity(part) for part in range(size)]
    if encoded.counts != sizes:
        raise ProtocolError(f"parts have {encoded.counts} bytes, but fixed sizes are {sizes}")
    mine = sizes[rank]
    received, own, gathered = (allocate(nbytes) for nbytes in (mine * size, mine, sum(sizes)))
    scatter = partial(comm.alltoall, encoded.buffer, received, sizes, [mine] * size)
    yield Wire(scatter, encoded.nbytes - mine)
    used = codec.decode_sum_encode(rank, split(received, [mine] * size), own)
    if used != mine:
        raise ProtocolError(f"the sum of part {rank} has {used} bytes, its fixed size is {mine}")
    yield Wire(partial(comm.allgather, own, gathered, sizes), (size - 1) * mine)
    for part, payload in enumerate(split(gathered, sizes)):
        codec.decode_into(part, payload)
