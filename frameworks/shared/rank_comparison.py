"""Whether integers are the same on all ranks: digests, and sums of the bits of variables."""

from __future__ import annotations

import numpy as np

from ringlet.fusion import Request
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array


class RankComparison:
    """A comparison under way of each of ``own`` integers, flat, with those of other ranks.

    Collective: all have equally many. Each takes twice its bytes on the wire.
    """

    def __init__(
        self, own: Array, name: str, process_set: ProcessSet, at_once: bool = False
    ) -> None:
        both = np.concatenate([own, ~own])  # whose maximum is that of all, and of all the least
        dtype, number = own.dtype.name, process_set.number()
        request = Request(name, "allreduce", dtype, both.shape, ReduceOp.MAX, process_set=number)
        self._handle = current().engine.submit(request, both, at_once=at_once)

    def done(self) -> bool:
        """Whether all ranks have taken part, or it has failed."""
        return self._handle.done()

    def differing(self) -> Array:
        """Wait; return where ranks hold other integers: booleans, the same on every rank.

        Raises what went wrong.
        """
        most, least = np.split(self._handle.wait(), 2)
        differing: Array = most != ~least
        return differing


def same_digest(digest: bytes, name: str, process_set: ProcessSet) -> bool:
    """Whether all ranks have the same ``digest``, of one length. Collective, one answer for all."""
    own = np.frombuffer(digest, np.uint8)
    return not RankComparison(own, name, process_set, at_once=True).differing().any()
