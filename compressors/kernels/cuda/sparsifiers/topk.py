"""Launches of ``topk.cuh``: the k entries of largest magnitude of many tensors at once.

Twelve launches for up to 32 tensors, of which three read memory in full (two of them in strides);
the host learns nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS
from ringlet.compressors.kernels.cuda.common.candidates import SEARCH, Candidates, Scratch, Wanted
from ringlet.compressors.kernels.cuda.runtime.device import Device
from ringlet.compressors.kernels.cuda.runtime.source import Program
from ringlet.compressors.kernels.cuda.runtime.table import MOST_SEGMENTS

PARTS = (
    "runtime/table", "runtime/values", "runtime/scan", "common/candidates", "sparsifiers/topk",
)  # fmt: skip
KERNELS = ("sample", "collect", "widen", *SEARCH)


class Selected(NamedTuple):
    """One tensor: where its entries come from, and where they go to.

    ``x`` is flat: float32, float16, or bfloat16 as uint16; ``indices`` (uint32) and ``values``
    (float32) have k elements, k at least 1; ``residual`` (float32) is used with feedback.
    """

    x: Array
    indices: Array
    values: Array
    residual: Array | None = None


def largest(
    device: Device,
    tensors: Sequence[Selected],
    scratch: Scratch,
    decay: float = 1.0,
    scale: float = 1.0,
    flag: Array | None = None,
) -> None:
    """Select from scale * x, or with residuals from scale * x + decay * residual.

    That sum becomes the residual where it is finite; what is sent and finite is zeroed there. All
    tensors have a residual or none, and one input dtype. ``scratch(name, n, dtype)`` returns
    uninitialised device memory. ``flag`` (int32, one element) becomes 1 where something sent is
    not finite.
    """
    tensors = [tensor for tensor in tensors if tensor.x.size]
    for start in range(0, len(tensors), MOST_SEGMENTS):
        some = tensors[start : start + MOST_SEGMENTS]
        for _, indices, values, _ in some:
            check_lengths("the largest entries", values.size, indices=indices)
        wanted = [Wanted(x, values.size, residual) for x, _, values, residual in some]
        code = program(INPUTS[wanted[0].x.dtype.name], int(wanted[0].residual is not None))
        candidates = Candidates(device, code, wanted, scratch, decay, scale, flag)
        candidates.launch("sample", "tensors")
        candidates.launch("collect", "units")
        candidates.launch("widen", "units")
        candidates.search()
        candidates.place()
        candidates.emit([(indices, values) for _, indices, values, _ in some])


def program(input_: int, feedback: int) -> Program:
    """Return the program for an input dtype (see ``bucketed``), with feedback or without."""
    constants = (("BITS", 8), ("GROUP", 32), ("INPUT", input_), ("FEEDBACK", feedback))
    return Program(PARTS, KERNELS, constants)
