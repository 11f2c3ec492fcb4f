"""Flat tensors of FSDP2's collectives in pieces, which are compressed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ringlet.compressors import Compressor, NoCompression, Payload
from ringlet.compressors.base.contract import storage
from ringlet.compressors.core.payload import padded
from ringlet.fusion.planning.strategy import effective
from ringlet.ring.dtypes import Array

_NONE = NoCompression()


class Piece(NamedTuple):
    """One parameter's elements in what a rank gets or gives, and where their payload lies there."""

    start: int
    stop: int
    key: str  # of what is remembered: the same whichever parameters are left out
    compressor: Compressor
    place: int  # in bytes
    layout: list[tuple[str, Any, int]]

    @property
    def end(self) -> int:
        """Where the payload ends."""
        return self.place + sum(padded(dtype.itemsize * n) for _, dtype, n in self.layout)

    def payload(self, buffer: Array) -> Payload:
        """Return the payload as views of a rank's part of a buffer."""
        views: Payload = {}
        place = self.place
        for name, dtype, elements in self.layout:
            size = dtype.itemsize * elements
            views[name] = buffer[place : place + size].view(dtype)
            place += padded(size)
        return views


def divided(
    compressor: Compressor,
    spans: Sequence[tuple[int, int]],
    key: Callable[[int, int], str],
    exact: Compressor = _NONE,
) -> Iterator[Piece]:
    """Yield the pieces of shards that lie one behind the other, one for each parameter.

    ``spans`` tell where shards begin and end among those of all parameters, of which some may be
    left out, and ``key`` names what lies between two such places. Small ones travel as they are, by
    ``exact``, and are one piece where they follow each other.
    """
    used = [effective(compressor, "float32", stop - start) for start, stop in spans]
    start = stop = place = first = 0
    for i, (begin, end) in enumerate(spans):
        if start == stop:
            first = begin
        stop += end - begin
        small = isinstance(used[i], NoCompression)
        if small and i + 1 < len(spans) and isinstance(used[i + 1], NoCompression):
            continue
        by = exact if small else used[i]
        layout = [(p.name, storage(p.dtype), p.elements) for p in by.layout(stop - start)]
        piece = Piece(start, stop, key(first, end), by, place, layout)
        yield piece
        start, place = stop, piece.end
