"""Launches of ``candidates.cuh`` and the search among candidates: what all selections share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.runtime import launch_table as tables
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.source import Program

UNIT = 4096  # elements whose candidates lie together
TOGETHER = 64  # units that a block looks at when it works on candidates
SEARCH = ("tally", "narrow", "rank", "order", "emit")
STATE = 8 + 2048  # words
SELECTION = np.dtype(
    [
        ("table", tables.TABLE), ("offsets", "u8"), ("values", "u8"), ("counts", "u8"),
        ("places", "u8"), ("states", "u8"), ("taken", "u8"), ("sums", "u8"), ("passing", "u8"),
    ]
)  # fmt: skip


class Wanted(NamedTuple):
    """One tensor to select from: its values, how many entries are wanted, its residual.

    ``x`` is flat and not empty: float32, float16, or bfloat16 as uint16; ``residual`` (float32) is
    used with feedback.
    """

    x: Array
    entries: int
    residual: Array | None = None


class Candidates:
    """Up to 32 tensors, the memory that their candidates take, and the launches over them.

    ``scratch(name, n, dtype)`` returns uninitialised device memory. With residuals what is selected
    from is scale * x + decay * residual. ``flag`` (int32, one element) becomes 1 where something
    sent is not finite.
    """

    def __init__(
        self,
        device: Device,
        code: Program,
        tensors: Sequence[Wanted],
        scratch: Scratch,
        decay: float,
        scale: float,
        flag: Array | None,
    ) -> None:
        self.device, self.code, self.tensors, self.scratch = device, code, tensors, scratch
        self.tables: dict[str, npt.NDArray[np.void]] = {}
        self.blocks = {"tensors": len(tensors), "launch": 1}
        self.memory: dict[str, Array] = {}
        units = self.add_table("units", UNIT)
        self.add_table("groups", UNIT * TOGETHER)
        for table in self.tables.values():
            inner = table["table"]
            inner["decay"], inner["scale"] = decay, scale
            inner["flag"] = 0 if flag is None else device.address(flag)
        self.lay("offsets", units * UNIT, np.uint16)
        self.lay("values", units * UNIT, np.float32)
        self.lay("counts", units, np.uint32)
        self.lay("places", 2 * units, np.uint32)
        self.lay("states", len(tensors) * STATE, np.uint32)
        self.lay("taken", len(tensors), np.uint32)

    def add_table(self, per: str, elements: int) -> int:
        """Make the table for blocks of so many elements each, from others' where there are some."""
        made = next(iter(self.tables.values())).copy() if self.tables else np.zeros(1, SELECTION)
        first = units = 0
        for i, (x, entries, residual) in enumerate(self.tensors):
            check_lengths("a selection", x.size, residual=residual)
            kept = 0 if residual is None else self.device.address(residual)
            row = (self.device.address(x), kept, x.size, first, entries, units)
            made["table"]["segments"][0, i] = row
            units += -(-x.size // UNIT)
            first += -(-x.size // elements)
        made["table"]["count"], made["table"]["units"] = len(self.tensors), first
        self.tables[per], self.blocks[per] = made, first
        return first

    def lay(self, name: str, n: int, dtype: npt.DTypeLike) -> None:
        """Lay out an array of scratch memory that the kernels know by this name."""
        array = self.memory[name] = self.scratch(f"select {name}", n, dtype)
        for table in self.tables.values():
            table[name] = self.device.address(array)

    def set_parts(self, first: int, parts: npt.NDArray[np.void]) -> None:
        """Fill the tables' parts from ``first`` on."""
        for table in self.tables.values():
            table["table"]["parts"][0, first : first + len(parts)] = parts

    def launch(self, kernel: str, per: str, blocks: int | None = None) -> None:
        """Run a kernel with a block per tensor, unit, group of units, or one per "launch"."""
        table = self.tables.get(per, self.tables["units"])
        self.device.launch(self.code, kernel, blocks or self.blocks[per], table)

    def search(self) -> None:
        """Find the magnitude of the rank that is left, among the candidates."""
        for level in range(3):
            for table in self.tables.values():
                table["table"]["shards"] = level
            self.launch("tally", "groups")
            self.launch("narrow", "tensors")

    def place(self) -> None:
        """Find out where each unit's entries go."""
        self.launch("rank", "groups")
        self.launch("order", "tensors")

    def emit(self, payloads: Sequence[tuple[Array, Array]]) -> None:
        """Write indices (uint32) and values (float32), and forget in residuals what is sent."""
        parts = np.zeros(len(payloads), tables.PART)
        for i, (indices, values) in enumerate(payloads):
            parts[i] = (self.device.address(indices), self.device.address(values), 0)
        self.set_parts(0, parts)
        self.launch("emit", "groups")
