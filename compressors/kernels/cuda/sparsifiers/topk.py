"""Launches of ``topk.cuh``: the k entries of largest magnitude of many tensors at once.

Among candidates, whose kernels are those of ``candidates.cuh``.
Twelve launches for up to 32 tensors, of which three read memory in full (two of them in strides);
the host learns nothing in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.core.multitensor import Decoding, Encoding, Spaced
from ringlet.compressors.kernels.cuda.common import scatter
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS
from ringlet.compressors.kernels.cuda.common.candidates import SEARCH, Candidates, Wanted
from ringlet.compressors.kernels.cuda.common.multitensor import rounded, summed
from ringlet.compressors.kernels.cuda.common.scatter import Entries, Sparse
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.launch_table import MOST_SEGMENTS
from ringlet.compressors.kernels.cuda.runtime.source import Program

PARTS = (
    "runtime/launch_table", "runtime/values", "runtime/scan", "common/candidates",
    "sparsifiers/topk",
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


class TopKSelections:
    """Kernels of ``topk``: payloads of indices (uint32) and values (float32), as many as wanted."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def encode(
        self,
        tensors: Sequence[Encoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        decay: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Select by a sampled threshold, then by radix; the host learns nothing in between."""
        _unweighted(weight)
        if spaced is not None:
            tensors, scale = summed(self, tensors, spaced, scale, weight), 1.0
        wanted = [
            Selected(t.x, t.payload["indices"], t.payload["values"], t.residual)
            for t in tensors
            if t.x is not None
        ]
        largest(self._device, wanted, tensors[0].ctx.workspace.array, decay, scale)

    def decode(
        self,
        tensors: Sequence[Decoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Clear outputs, and add the entries of one payload after the other."""
        _unweighted(weight)
        count, stride = spaced or (1, 0)
        address = self._device.address

        def run(outs: Sequence[Array], factor: float) -> None:
            sums = []
            for out, t in zip(outs, tensors, strict=True):
                indices, values = t.source["indices"], t.source["values"]
                places = address(indices), address(values)
                steps = range(0, count * stride, stride) if stride else (0,)
                entries = [Entries(places[0] + by, places[1] + by, values.size) for by in steps]
                sums.append(Sparse(out, entries))
            scatter.sums(self._device, sums, factor)

        rounded(self._device, [t.out for t in tensors], tensors[0].ctx, scale, run)


def _unweighted(weight: float) -> None:
    if weight != 1.0:
        raise ValueError("entries that are selected are decoded as they are")
