"""The table of tensors that a launch works on; its layout is that of ``launch_table.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_SEGMENTS = 32
MOST_PARTS = 96

SEGMENT = np.dtype(
    [
        ("data", "u8"), ("residual", "u8"), ("n", "i8"), ("first", "i8"), ("key", "u8"),
        ("start", "u8"),
    ]
)  # fmt: skip
PART = np.dtype([("codes", "u8"), ("scales", "u8"), ("lows", "u8")])
TABLE = np.dtype(
    [
        ("segments", SEGMENT, MOST_SEGMENTS), ("parts", PART, MOST_PARTS), ("units", "i8"),
        ("forward", "u8"), ("inverse", "u8"), ("flag", "u8"), ("stride", "i8"),
        ("count", "i4"), ("shards", "i4"), ("decay", "f4"), ("scale", "f4"),
        ("weight", "f4"), ("unused", "i4"),
    ]
)  # fmt: skip


def empty(
    shards: int, decay: float = 1.0, scale: float = 1.0, weight: float = 1.0, stride: int = 0
) -> npt.NDArray[Any]:
    """Return a table without segments, as an array of one element."""
    table = np.zeros(1, TABLE)
    table["shards"], table["stride"] = shards, stride
    table["decay"], table["scale"], table["weight"] = decay, scale, weight
    return table


def fill(table: npt.NDArray[Any], name: str, rows: Sequence[tuple[int, ...]]) -> None:
    """Set the first ``segments`` or ``parts`` of a table, all at once: row by row is slow."""
    table[name][0, : len(rows)] = np.array(rows, table[name].dtype)
