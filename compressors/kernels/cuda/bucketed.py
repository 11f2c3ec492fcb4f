"""Launches of ``encode.cuh`` and ``decode.cuh``: many tensors at once, on the current stream.

A launch takes a table of up to 32 tensors by value, so a fusion buffer of more needs a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.context import Array
from ringlet.compressors.kernels.cuda import table as tables
from ringlet.compressors.kernels.cuda.device import Device
from ringlet.compressors.kernels.cuda.source import Program
from ringlet.compressors.kernels.cuda.table import MOST_PARTS, MOST_SEGMENTS

INPUTS = {"float32": 0, "float16": 1, "uint16": 2}  # uint16 holds bfloat16
_CHUNK = 8  # elements that a thread handles at a time


class Target(NamedTuple):
    """One tensor to encode: its values, its payload's arrays, its random numbers.

    ``x`` is flat: float32, float16, or bfloat16 as uint16; None where ``sources`` are summed.
    ``residual`` (float32) is used with feedback, ``sources`` in ``recode`` alone; ``start`` is the
    counter of the first element.
    """

    x: Array | None
    n: int
    payload: Sequence[Array]
    residual: Array | None = None
    key: int = 0
    start: int = 0
    sources: Sequence[Sequence[Array]] = ()


class Output(NamedTuple):
    """One tensor to decode: where to (flat float32), and the arrays of each payload."""

    out: Array
    sources: Sequence[Sequence[Array]]


@dataclass(frozen=True)
class Codec:
    """A codec of fixed options: ``name`` its file, ``bits`` of a code, elements of a ``bucket``."""

    name: str
    bits: int
    bucket: int
    constants: tuple[tuple[str, int | float], ...] = ()

    @property
    def group(self) -> int:
        """How many threads share a bucket."""
        return min(32, 1 << ((self.bucket // _CHUNK).bit_length() - 1))

    def work(self, kernel: str) -> tuple[int, int]:
        """Return how many elements a unit of work has, and how many threads."""
        return (self.bucket, self.group) if kernel == "encode" else (_CHUNK, 1)

    def prepare(self, device: Device, table: npt.NDArray[Any]) -> None:
        """Set what else the kernels need."""

    def encode(
        self,
        device: Device,
        targets: Sequence[Target],
        decay: float = 1.0,
        scale: float = 1.0,
        flag: Array | None = None,
    ) -> None:
        """Encode scale * x, plus decay * residual where targets have one, in one pass over memory.

        Where targets have ``sources`` instead of ``x`` their sum is encoded, in order (decode, sum
        and encode again). All have a residual or none, one input dtype, equally many sources.
        ``flag`` (int32, one element) becomes 1 where something encoded is not finite. Residuals
        keep their old value wherever the new one would not be finite.
        """
        shards = len(targets[0].sources) if targets else 0
        if shards >= MOST_PARTS:
            raise ValueError(f"a launch sums at most {MOST_PARTS - 1} payloads, not {shards}")
        unit, threads = self.work("encode")
        for some in _batches(targets, min(MOST_SEGMENTS, MOST_PARTS // (shards + 1))):
            table, first = tables.empty(shards, decay, scale), 0
            for i, target in enumerate(some):
                data = 0 if target.x is None else device.address(target.x)
                kept = 0 if target.residual is None else device.address(target.residual)
                row = (data, kept, target.n, first, target.key, target.start)
                table["segments"][0, i] = row
                first += -(-target.n // unit)
            payloads = [t.payload for t in some] + [s for t in some for s in t.sources]
            for i, arrays in enumerate(payloads):
                table["parts"][0, i] = _part(device, arrays)
            table["count"], table["units"] = len(some), first
            table["flag"] = 0 if flag is None else device.address(flag)
            program = self.program(
                "encode",
                INPUT=0 if some[0].x is None else INPUTS[some[0].x.dtype.name],
                FEEDBACK=int(some[0].residual is not None),
                SUMMED=int(shards > 0),
            )
            self.prepare(device, table)
            _launch(device, program, first * threads, table)

    def decode(
        self, device: Device, outputs: Sequence[Output], add: bool = False, scale: float = 1.0
    ) -> None:
        """Overwrite each output with scale * the sum of its payloads, in order, in one pass.

        With ``add`` scale * each payload is added to what is there, one by one. ``scale`` must be 1
        for sums of more than 96 payloads.
        """
        shards = len(outputs[0].sources) if outputs else 0
        if shards > MOST_PARTS:
            if scale != 1.0:
                raise ValueError("a sum is scaled only where one launch makes it")
            self.decode(device, [Output(o.out, o.sources[:MOST_PARTS]) for o in outputs], add)
            # Sums go on from where they stand: the order is that of one pass.
            self.decode(device, [Output(o.out, o.sources[MOST_PARTS:]) for o in outputs], True)
            return
        unit, threads = self.work("decode")
        for some in _batches(outputs, min(MOST_SEGMENTS, MOST_PARTS // max(shards, 1))):
            table, first = tables.empty(shards, 1.0, scale), 0
            for i, (out, sources) in enumerate(some):
                table["segments"][0, i] = (device.address(out), 0, out.size, first, 0, 0)
                for j, arrays in enumerate(sources):
                    table["parts"][0, i * shards + j] = _part(device, arrays)
                first += -(-out.size // unit)
            table["count"], table["units"] = len(some), first
            self.prepare(device, table)
            _launch(device, self.program("decode", ADDING=int(add)), first * threads, table)

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program of "encode" (INPUT, FEEDBACK, SUMMED) or "decode" (ADDING).

        Switches that are not given are 0.
        """
        usual = {"encode": ("INPUT", "FEEDBACK", "SUMMED"), "decode": ("INPUT", "ADDING")}[kernel]
        constants: dict[str, int | float] = {
            "BITS": self.bits, "BUCKET": self.bucket, "GROUP": self.group,
        }  # fmt: skip
        constants |= dict.fromkeys(usual, 0) | dict(self.constants) | switches
        parts = ("groups", "table", "values", self.name, kernel)
        return Program(parts, (kernel,), tuple(constants.items()))


def _part(device: Device, arrays: Sequence[Array]) -> tuple[int, ...]:
    return tuple([device.address(array) for array in arrays] + [0] * (3 - len(arrays)))


def _batches(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _launch(device: Device, program: Program, threads: int, table: npt.NDArray[np.void]) -> None:
    if threads:
        device.launch(program, program.kernels[0], -(-threads // program.threads), table)
