"""Launches of ``microscaling.cuh`` and ``nvfp4.cuh``, which are built on ``minifloats.cuh``."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.minifloats import MiniFloat
from ringlet.compressors.kernels.cuda.common.bucketed import Codec
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import Program
from ringlet.compressors.kernels.cuda.runtime.table import MOST_SEGMENTS


class MiniFloats(Codec):
    """A codec whose codes are small floats."""

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program, with what rounds to small floats before the codec's own file."""
        made = super().program(kernel, **switches)
        place = made.parts.index(self.name)
        parts = (*made.parts[:place], "common/minifloats", *made.parts[place:])
        return dataclasses.replace(made, parts=parts)


class Measured(MiniFloats):
    """A codec whose tensors share a float32, which two more launches find before."""

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program, with the two other kernels where it encodes."""
        made = super().program(kernel, **switches)
        if kernel != "encode":
            return made
        return dataclasses.replace(
            made, parts=(*made.parts, "common/extent"), kernels=("encode", "clear", "extent")
        )

    def launch(
        self, device: Device, program: Program, threads: int, table: npt.NDArray[np.void]
    ) -> None:
        """Launch the two kernels first where tensors are encoded."""
        if threads and "extent" in program.kernels:
            device.launch(program, "clear", -(-MOST_SEGMENTS // program.threads), table)
            device.launch(program, "extent", -(-threads // program.threads), table)
        super().launch(device, program, threads, table)


def codec(
    name: str, form: MiniFloat, bucket: int, stochastic: bool, kind: type[Codec] = MiniFloats
) -> Codec:
    """Return the codec of the file ``name``, of ``kind``, for a format and rounding."""
    constants: dict[str, int | float] = {
        "MANTISSA": form.mantissa, "LOWEST": form.lowest, "LARGEST": form.largest,
        "INFINITE": form.largest + 1 if form.has_inf else 255, "STOCHASTIC": int(stochastic),
    }  # fmt: skip
    return kind(name, form.bits, bucket, tuple(constants.items()), random=stochastic)
