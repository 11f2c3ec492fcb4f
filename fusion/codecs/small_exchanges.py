"""The small members of a bucket that exchange in rounds, together: a few calls for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from ringlet.compressors.base.batched import (
    BatchedRounds,
    Exchanged,
    ExchangeOfMany,
    RoundOfMany,
    addresses,
)
from ringlet.fusion.codecs.small_members import MOST
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.planning.member import Member, named
from ringlet.ring.dtypes import Array


class SmallExchanges:
    """Members that have one compressor, and what they exchange in a step.

    ``members`` are those of the step at hand, and none where they are done, or given up. Where a
    rank has them on a GPU they exchange one by one there: values lie in the same places.
    """

    def __init__(self, members: Sequence[Member], kernels: BatchedRounds) -> None:
        self._all, self._kernels = members, kernels
        self.members: Sequence[Member] = []
        self._exchange: ExchangeOfMany | None = None
        self._round: RoundOfMany | None = None
        self._addresses = np.empty(0, np.uint64)  # of the values of the round at hand

    @classmethod
    def of(cls, members: Sequence[Member]) -> Self | None:
        """Return the small ones of ``members``; None where nothing exchanges them together."""
        first = members[0]
        kernels = None if first.place.ordered else first.compressor.batched_rounds()
        if kernels is None:
            return None
        found = [
            member
            for member in members
            if member.compressor == first.compressor
            and member.request.dtype == "float32"
            and member.whole is None
            and member.prescale == 1.0
            and member.numel <= MOST
            and kernels.takes(member.request.shape)
        ]
        return cls(found, kernels) if len(found) > 1 else None

    def begin(self) -> None:
        """Begin a step. Raises CompressionFailed."""
        tensors = [Exchanged(m.input, m.output, m.context(0, 1)) for m in self._all]
        self._exchange = self._kernels.exchange(tensors)
        self._round = self._call(next, self._exchange)
        self.members = self._all

    @property
    def key(self) -> tuple[str, str]:
        """The operation and the dtype of the round at hand."""
        return ("", "") if self._round is None else (self._round.op, self._round.dtype)

    @property
    def lengths(self) -> Sequence[int]:
        """How many values each of ``members`` has in the round at hand."""
        return [] if self._round is None else self._round.lengths

    def write(self, buffer: Array, starts: Sequence[int]) -> None:
        """Write each one's values into ``buffer``, from ``starts`` on. Raises CompressionFailed."""
        if self._round is not None:
            self._addresses = addresses(buffer, starts)
            self._call(self._round.write, self._addresses)

    def resume(self) -> list[Member]:
        """Go on with what lies where ``write`` wrote; return whose result is complete.

        Raises CompressionFailed.
        """
        if self._exchange is None:
            return []
        self._round = self._call(self._next)
        return self._end() if self._round is None else []

    def abandon(self) -> None:
        """Forget an exchange that is not over."""
        if self._exchange is not None:
            self._exchange.close()
        self._end()

    def _next(self) -> RoundOfMany | None:
        assert self._exchange is not None
        try:
            return self._exchange.send(self._addresses)
        except StopIteration:
            return None

    def _end(self) -> list[Member]:
        done, self.members = self.members, []
        self._exchange = self._round = None
        return list(done)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call into the compressor; what it raises is told with tensors' names."""
        try:
            return function(*args)
        except BaseException as error:
            compressor = self._all[0].compressor
            exchange, what = compressor.exchange, named(self._all)
            raise CompressionFailed.of(compressor, exchange, what, error) from error
