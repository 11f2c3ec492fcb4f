"""Launches of ``encode.cuh`` and ``decode.cuh``: many tensors at once, on the current stream.

A launch takes a table of up to 32 tensors by value, so a fusion buffer of more needs a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.core.multitensor import Spaced
from ringlet.compressors.kernels.cuda.runtime import launch_table as tables
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.launch_table import MOST_PARTS, MOST_SEGMENTS
from ringlet.compressors.kernels.cuda.runtime.source import Program

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
    """One tensor to decode: where to (flat), and the arrays of each payload.

    ``out`` is float32, or where nothing is added and the codec is ``fused`` of the input dtypes.
    """

    out: Array
    sources: Sequence[Sequence[Array]]


@dataclass(frozen=True)
class BucketedCodec:
    """A codec of fixed options: ``name`` its file, ``bits`` of a code, elements of a ``bucket``.

    ``name`` is ROOM/NAME, as in ``Program``. ``random`` tells whether it draws random numbers:
    others need no keys, which take time to make.
    """

    name: str
    bits: int
    bucket: int
    constants: tuple[tuple[str, int | float], ...] = ()
    random: bool = field(default=False, kw_only=True)

    @property
    def group(self) -> int:
        """How many threads share a bucket."""
        return min(32, 1 << ((self.bucket // _CHUNK).bit_length() - 1))

    @property
    def fused(self) -> bool:
        """Whether sums are encoded again, and outputs of 16 bits rounded, in the same pass."""
        return True

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
        weight: float = 1.0,
        spaced: Spaced | None = None,
    ) -> None:
        """Encode scale * x, plus decay * residual where targets have one, in one pass over memory.

        Where targets have ``sources`` instead of ``x`` their sum is encoded, in order (decode, sum
        and encode again), times ``weight``, which is also what residuals take decoded values times.
        All have a residual or none, one input dtype, equally many sources: with ``spaced`` one,
        the first of those that it tells. ``flag`` (int32, one element) becomes 1 where something
        encoded is not finite. Residuals keep their old value wherever the new one would not be
        finite.
        """
        given = len(targets[0].sources) if targets else 0
        if given >= MOST_PARTS:
            raise ValueError(f"a launch sums at most {MOST_PARTS - 1} payloads, not {given}")
        shards, stride = spaced or (given, 0)
        unit, threads = self.work("encode")
        for some in _batches(targets, min(MOST_SEGMENTS, MOST_PARTS // (given + 1))):
            table, first, rows = tables.empty(shards, decay, scale, weight, stride), 0, []
            for target in some:
                check_lengths(self.name, target.n, x=target.x, residual=target.residual)
                data = 0 if target.x is None else device.address(target.x)
                kept = 0 if target.residual is None else device.address(target.residual)
                rows.append((data, kept, target.n, first, target.key, target.start))
                first += -(-target.n // unit)
            payloads = [t.payload for t in some] + [s for t in some for s in t.sources]
            tables.fill(table, "segments", rows)
            tables.fill(table, "parts", [_part(device, arrays) for arrays in payloads])
            table["count"], table["units"] = len(some), first
            table["flag"] = 0 if flag is None else device.address(flag)
            program = self.program(
                "encode",
                INPUT=0 if some[0].x is None else INPUTS[some[0].x.dtype.name],
                FEEDBACK=int(some[0].residual is not None),
                SUMMED=int(shards > 0),
            )
            self.prepare(device, table)
            self.launch(device, program, first * threads, table)

    def decode(
        self,
        device: Device,
        outputs: Sequence[Output],
        add: bool = False,
        scale: float = 1.0,
        weight: float = 1.0,
        spaced: Spaced | None = None,
    ) -> None:
        """Overwrite outputs with scale * (weight * the sum of their payloads, in order), in a pass.

        With ``add`` scale * each payload is added to what is there, one by one. With ``spaced``
        outputs have one source each, the first of those that it tells; without it ``scale`` and
        ``weight`` must be 1 for sums of more than 96 payloads.
        """
        given = len(outputs[0].sources) if outputs else 0
        if given > MOST_PARTS:
            if scale != 1.0 or weight != 1.0:
                raise ValueError("a sum is scaled only where one launch makes it")
            self.decode(device, [Output(o.out, o.sources[:MOST_PARTS]) for o in outputs], add)
            # Sums go on from where they stand: the order is that of one pass.
            self.decode(device, [Output(o.out, o.sources[MOST_PARTS:]) for o in outputs], True)
            return
        shards, stride = spaced or (given, 0)
        unit, threads = self.work("decode")
        for some in _batches(outputs, min(MOST_SEGMENTS, MOST_PARTS // max(given, 1))):
            table, first, rows = tables.empty(shards, 1.0, scale, weight, stride), 0, []
            for out, _ in some:
                rows.append((device.address(out), 0, out.size, first, 0, 0))
                first += -(-out.size // unit)
            parts = [_part(device, arrays) for _, sources in some for arrays in sources]
            tables.fill(table, "segments", rows)
            tables.fill(table, "parts", parts)
            table["count"], table["units"] = len(some), first
            self.prepare(device, table)
            program = self.program("decode", ADDING=int(add), OUTPUT=INPUTS[some[0].out.dtype.name])
            self.launch(device, program, first * threads, table)

    def launch(
        self, device: Device, program: Program, threads: int, table: npt.NDArray[np.void]
    ) -> None:
        """Run the program's first kernel on so many threads."""
        if threads:
            device.launch(program, program.kernels[0], -(-threads // program.threads), table)

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program of "encode" (INPUT, FEEDBACK, SUMMED) or "decode" (ADDING or OUTPUT).

        Switches that are not given are 0.
        """
        usual = {
            "encode": ("INPUT", "FEEDBACK", "SUMMED"),
            "decode": ("INPUT", "ADDING", "OUTPUT"),
        }[kernel]
        constants: dict[str, int | float] = {
            "BITS": self.bits, "BUCKET": self.bucket, "GROUP": self.group,
        }  # fmt: skip
        constants |= dict.fromkeys(usual, 0) | dict(self.constants) | switches
        parts = (
            "runtime/groups",
            "runtime/launch_table",
            "runtime/values",
            self.name,
            f"common/{kernel}",
        )
        return Program(parts, (kernel,), tuple(constants.items()))


def _part(device: Device, arrays: Sequence[Array]) -> tuple[int, ...]:
    return tuple([device.address(array) for array in arrays] + [0] * (3 - len(arrays)))


def _batches(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
