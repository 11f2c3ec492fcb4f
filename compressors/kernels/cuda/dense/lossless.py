"""Launches of ``lossless.cuh``: exponents in few bits, of many tensors at once.

Four launches encode up to 32 tensors. The host waits for the device once between them, for eight
bytes a tensor, because sizes depend on the values. Decoding takes three and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.multitensor import Encoding, Sum
from ringlet.compressors.core.traits import Payload
from ringlet.compressors.kernels.cuda.common import scatter
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS, Output
from ringlet.compressors.kernels.cuda.common.multitensor import HALVES, rounded, scratch_arrays
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program

BLOCK, STREAMS = 512, 64
GROUPED = 2048  # blocks whose sizes are summed together
MOST = 32  # tensors of a launch
_FIXED = {"tops": BLOCK, "widths": BLOCK, "counts": BLOCK, "mantissas": 1}  # elements for one entry
_ORDER = ("tops", "widths", "counts", "codes", "spares", "mantissas", "rests")  # as on the CPU
_CODED = np.dtype(
    [
        ("data", "u8"), ("tops", "u8"), ("widths", "u8"), ("counts", "u8"), ("codes", "u8"),
        ("spares", "u8"), ("mantissas", "u8"), ("rests", "u8"), ("codes_size", "i8"),
        ("spares_size", "i8"), ("n", "i8"), ("first", "i8"), ("group", "i8"),
    ]
)  # fmt: skip
_CODING = np.dtype(
    [
        ("tensors", _CODED, MOST), ("far", "u8"), ("places", "u8"), ("apart", "u8"),
        ("codes_before", "u8"), ("spares_before", "u8"), ("totals", "u8"), ("blocks", "i8"),
        ("count", "i4"), ("unused", "i4"),
    ]
)  # fmt: skip
New = Callable[[int, npt.DTypeLike], Array]


class Coded(NamedTuple):
    """One tensor: its values (float32, float16, or bfloat16 as uint16) or output, its payload."""

    data: Array
    payload: dict[str, Array]


def encode(
    device: Device, xs: Sequence[Array], exact: bool, scratch: Scratch, new: New
) -> list[dict[str, Array]]:
    """Return the payload of each flat array, all of one dtype.

    ``exact``: of float32; else of values rounded to bfloat16. ``scratch(name, n, dtype)`` and
    ``new(n, dtype)`` return uninitialised device memory; payloads are new.
    """
    made: list[dict[str, Array]] = []
    for start in range(0, len(xs), MOST):
        some = [Coded(x, _fixed(x.size, exact, new)) for x in xs[start : start + MOST]]
        launches = _Launches(device, program(INPUTS[some[0].data.dtype.name], exact), some, scratch)
        launches.lay("far", launches.blocks * BLOCK, np.uint8)
        launches.run("survey")
        launches.arrange()
        for (_, payload), (units, spares) in zip(some, launches.totals().tolist(), strict=True):
            payload["codes"], payload["spares"] = (
                new(units * STREAMS, np.uint8),
                new(spares, np.uint8),
            )
        launches.point("codes", "spares")
        launches.run("encode")
        made += [{name: p[name] for name in _ORDER if name in p} for _, p in some]
    return made


def decode(
    device: Device, outputs: Sequence[Coded], exact: bool, add: bool, scratch: Scratch
) -> None:
    """Fill the outputs (flat float32) with what their payloads encode, or ``add`` that."""
    for start in range(0, len(outputs), MOST):
        launches = _Launches(device, program(0, exact, add), outputs[start : start + MOST], scratch)
        launches.point("codes", "spares")
        launches.arrange()
        launches.run("decode")


def program(input_: int, exact: bool, add: bool = False) -> Program:
    """Return the program for an input dtype (see ``bucketed``) and these options."""
    constants = (("BITS", 8), ("INPUT", input_), ("EXACT", int(exact)), ("ADDING", int(add)))
    kernels = ("survey", "arrange", "carry", "encode", "decode")
    parts = ("runtime/launch_table", "runtime/values", "runtime/scan", "dense/lossless")
    return Program(parts, kernels, constants)


def _fixed(n: int, exact: bool, new: New) -> dict[str, Array]:
    """Return the arrays whose sizes are known before."""
    dtypes = {"tops": np.uint8, "widths": np.uint8, "counts": np.uint16, "mantissas": np.uint8}
    made = {name: new(-(-n // each), dtypes[name]) for name, each in _FIXED.items()}
    return made | {"rests": new(n, np.uint16)} if exact else made


class _Launches:
    """The launches over up to 32 tensors."""

    def __init__(
        self, device: Device, code: Program, tensors: Sequence[Coded], scratch: Scratch
    ) -> None:
        self._device, self._code, self._tensors, self._scratch = device, code, tensors, scratch
        self._table, self.blocks, self._groups = np.zeros(1, _CODING), 0, 0
        for i, (data, _) in enumerate(tensors):
            row = self._table["tensors"][0, i : i + 1]
            row["data"], row["n"] = device.address(data), data.size
            row["first"], row["group"] = self.blocks, self._groups
            blocks = -(-data.size // BLOCK)
            self.blocks += blocks
            self._groups += -(-blocks // GROUPED)
        self.point(*_FIXED, "rests")
        self._table["count"], self._table["blocks"] = len(tensors), self.blocks
        self._memory: dict[str, Array] = {}
        for name, n in (
            ("places", self.blocks), ("apart", self.blocks), ("codes_before", self._groups),
            ("spares_before", self._groups), ("totals", 2 * len(tensors)),
        ):  # fmt: skip
            self.lay(name, n, np.uint32)

    def lay(self, name: str, n: int, dtype: npt.DTypeLike) -> None:
        """Lay out scratch memory that the kernels know by this name."""
        array = self._memory[name] = self._scratch(f"lossless {name}", n, dtype)
        self._table[name] = self._device.address(array)

    def point(self, *names: str) -> None:
        """Tell the kernels where the payloads' arrays of these names lie."""
        for i, (_, payload) in enumerate(self._tensors):
            row = self._table["tensors"][0, i : i + 1]
            for name in names:
                if name in payload:
                    row[name] = self._device.address(payload[name])
            for name in {"codes", "spares"}.intersection(names):
                row[f"{name}_size"] = payload[name].size

    def arrange(self) -> None:
        """Find where each block's codes and spares begin."""
        if self._groups:
            self._device.launch(self._code, "arrange", self._groups, self._table)
        self._device.launch(self._code, "carry", len(self._tensors), self._table)

    def totals(self) -> Array:
        """Return units of codes and spares of each tensor; waits for the device."""
        return self._device.read(self._memory["totals"]).reshape(-1, 2)

    def run(self, kernel: str) -> None:
        """Run a kernel with a warp for each block."""
        if self.blocks:
            self._device.launch(self._code, kernel, -(-self.blocks * 32 // THREADS), self._table)


class Exponents:
    """Kernels of ``lossless``: exponents in few bits; ``check(payload, n)`` raises PayloadError."""

    feeds: ClassVar[bool] = False

    def __init__(self, device: Device, exact: bool, check: Callable[[Payload, int], None]) -> None:
        self._device, self._exact, self._check = device, exact, check

    def compress(
        self, tensors: Sequence[Encoding], scale: float = 1.0, decay: float = 1.0
    ) -> list[Payload]:
        """Encode in four launches for up to 32 tensors, scaled before where ``scale`` is not 1."""
        ctx = tensors[0].ctx
        xs = [t.x for t in tensors if t.x is not None]
        if scale != 1.0:
            xs = self._scaled(xs, scale, ctx)
        return encode(self._device, xs, self._exact, ctx.workspace.array, ctx.xp.empty)

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Decode the first payloads, and add the others, in three launches for up to 32 tensors."""
        workspace = sums[0].ctx.workspace

        def run(outs: Sequence[Array], factor: float) -> None:
            for number in range(len(sums[0].payloads)):
                coded = []
                for out, t in zip(outs, sums, strict=True):
                    self._check(t.payloads[number], out.size)
                    coded.append(Coded(out, t.payloads[number]))
                decode(self._device, coded, self._exact, number > 0, workspace.array)
            if factor != 1.0:
                scatter.multiply(self._device, outs, factor)

        rounded(self._device, [t.out for t in sums], sums[0].ctx, scale, run)

    def _scaled(self, xs: Sequence[Array], scale: float, ctx: Context) -> list[Array]:
        """Return scale * x as float32, in scratch memory."""
        wide, half = (
            scratch_arrays("scaled", [x.size for x in xs], ctx),
            HALVES.get(xs[0].dtype.name),
        )
        if half is None:
            for x, copy in zip(xs, wide, strict=True):
                copy[...] = x
            scatter.multiply(self._device, wide, scale)
        else:
            outputs = [Output(out, ((x,),)) for x, out in zip(xs, wide, strict=True)]
            half.decode(self._device, outputs, scale=scale)
        return wide
