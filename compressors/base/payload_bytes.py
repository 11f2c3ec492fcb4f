"""Payloads of variable size as bytes, many a call, in the format of ``core.payload``.

Each payload has its length (8 bytes) before it, as they lie one behind the other in a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.payload import entry_head
from ringlet.compressors.core.traits import Part, storage


class PayloadBytes:
    """How rows of ``base.batched`` whose sizes vary become bytes, and bytes rows.

    ``arrays`` are a payload's, in its order.
    """

    def __init__(self, arrays: Sequence[Part]) -> None:
        heads = [entry_head(part.name, storage(part.dtype)) for part in arrays]
        self._heads = np.zeros((len(heads), max(map(len, heads))), np.uint8)
        for row, head in zip(self._heads, heads, strict=True):
            row[: len(head)] = np.frombuffer(head, np.uint8)
        self._sizes = np.array([storage(part.dtype).itemsize for part in arrays], np.int64)

    def write(self, payloads: Array) -> tuple[Array, Array]:
        """Return payloads as bytes (uint8), one behind the other, and where each ends."""
        from ringlet.compressors.kernels.cpu.common import payload as kernels

        ends = np.empty(len(payloads), np.int64)
        kernels.measure(payloads, self._sizes, self._heads, ends)
        written = np.empty(int(ends[-1]), np.uint8)
        kernels.write(payloads, self._sizes, self._heads, ends, written)
        return written, ends

    def read(self, data: Array, starts: Array, lengths: Array) -> Array | None:
        """Return rows of payloads of so many elements, whose arrays lie in ``data`` (uint8).

        ``starts`` are those of ``split``. None where one has other arrays, or makes no sense.
        """
        from ringlet.compressors.kernels.cpu.common import payload as kernels

        rows = np.zeros((len(lengths), 1 + 2 * len(self._sizes)), np.uint64)
        rows[:, 0] = lengths
        return rows if kernels.read(data, starts, self._sizes, self._heads, rows) else None


def split(data: Array, count: int) -> Array | None:
    """Return where each of ``count`` payloads begins, behind its length, and one more would.

    None where there are not so many in ``data`` (uint8).
    """
    from ringlet.compressors.kernels.cpu.common import payload as kernels

    starts = np.empty(count + 1, np.int64)
    return starts if kernels.split(data, starts) else None
