"""Launches of ``nvfp4.cuh``, built on ``minifloats.cuh``, with ``tensor_scale.cuh`` before."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ringlet.compressors.kernels.cuda.common.minifloats import MiniFloats
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.launch_table import MOST_SEGMENTS
from ringlet.compressors.kernels.cuda.runtime.source import Program


class Measured(MiniFloats):
    """A codec whose tensors share a float32, which two more launches find before."""

    def program(self, kernel: str, **switches: int) -> Program:
        """Return the program, with the two other kernels where it encodes."""
        made = super().program(kernel, **switches)
        if kernel != "encode":
            return made
        return dataclasses.replace(
            made, parts=(*made.parts, "common/tensor_scale"), kernels=("encode", "clear", "extent")
        )

    def launch(
        self, device: Device, program: Program, threads: int, table: npt.NDArray[np.void]
    ) -> None:
        """Launch the two kernels first where tensors are encoded."""
        if threads and "extent" in program.kernels:
            device.launch(program, "clear", -(-MOST_SEGMENTS // program.threads), table)
            device.launch(program, "extent", -(-threads // program.threads), table)
        super().launch(device, program, threads, table)
