"""Flat tensors of FSDP2's collectives in pieces, which are compressed one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class LayoutFailed(Exception):
    """A ``compressor`` could not say how its payloads lie, because of what is the cause."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__(f"{compressor} has no layout")
        self.compressor = compressor


def divided(
    spans: Sequence[tuple[int, int]],
    compressors: Sequence[Compressor],
    key: Callable[[int, int], str],
    exact: Compressor = _NONE,
) -> list[Piece]:
    """Return the pieces of shards that lie one behind the other, one for each parameter.

    ``spans`` tell where shards begin and end among those of all parameters, of which some may be
    left out; ``compressors`` are those of each, and ``key`` names what lies between two such
    places. Small ones travel as they are, by ``exact``, and are one piece where they follow each
    other. Raises LayoutFailed for whatever a compressor raises.
    """
    pieces: list[Piece] = []
    asked, used = exact, list[Compressor]()
    try:
        for asked, (start, stop) in zip(compressors, spans, strict=True):
            used.append(effective(asked, "float32", stop - start))
        start = stop = place = first = 0
        for i, (begin, end) in enumerate(spans):
            if start == stop:
                first = begin
            stop += end - begin
            small = isinstance(used[i], NoCompression)
            if small and i + 1 < len(spans) and isinstance(used[i + 1], NoCompression):
                continue
            asked = exact if small else used[i]
            layout = [(p.name, storage(p.dtype), p.elements) for p in asked.layout(stop - start)]
            pieces.append(Piece(start, stop, key(first, end), asked, place, layout))
            start, place = stop, pieces[-1].end
    except BaseException as error:  # such as SystemExit, or a panic of Rust's
        raise LayoutFailed(asked) from error
    return pieces
