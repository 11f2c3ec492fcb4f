"""Launches of the kernels of ``blocktopk.cuh``: top-k inside blocks, a CUDA block for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import THREADS, Program


@dataclass(frozen=True)
class BlockCodec(BucketedCodec):
    """``kept`` entries of a block, indices of ``width`` bits; ``bucket`` is the block.

    ``basis`` gives the matrices (forward, inverse) of a transform; None: there is none. A decoder
    leaves out indices beyond their block, which no encoder sends.
    """

    kept: int = 1
    width: int = 16
    basis: Any = None

    @property
    def fused(self) -> bool:
        """Sums lie in memory before their largest entries are searched for."""
        return False

    def work(self, kernel: str) -> tuple[int, int]:
        """Return the elements of a block, and the threads that share it."""
        return self.bucket, self.threads

    @property
    def threads(self) -> int:
        """A multiple of 32: eight elements for each, but no fewer than needed for short blocks."""
        return min(THREADS, -(-self.bucket // 32) * 32)

    def prepare(self, device: Device, table: npt.NDArray[Any]) -> None:
        """Set the matrices."""
        if table["weight"][0] != 1:
            raise ValueError("selected entries are decoded as they are")
        if self.basis is not None:
            matrices: tuple[Array, Array] = self.basis(self.bucket)
            for name, matrix in zip(("inverse", "forward"), matrices, strict=True):
                kept = device.constant(f"{self.name} {name} {self.bucket}", matrix)
                table[name] = device.address(kept)

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program of "encode" (INPUT, FEEDBACK) or "decode" (ADDING)."""
        if switches.pop("SUMMED", 0) or switches.pop("OUTPUT", 0):
            raise ValueError("sums of selected entries are decoded to float32 first")
        constants: dict[str, int | float] = {
            "BLOCK": self.bucket, "KEPT": self.kept, "WIDTH": self.width, "VALUE_BITS": self.bits,
            "ROTATED": int(self.basis is not None), "ENCODING": int(kernel == "encode"),
            "BITS": 8, "GROUP": 32, "INPUT": 0, "FEEDBACK": 0, "ADDING": 0,
        }  # fmt: skip
        parts = (
            "runtime/groups",
            "runtime/launch_table",
            "runtime/values",
            "runtime/scan",
            self.name,
        )
        named = tuple((constants | switches).items())
        return Program(parts, (kernel,), named, self.threads)
