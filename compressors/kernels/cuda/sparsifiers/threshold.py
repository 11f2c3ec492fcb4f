"""Launches of ``estimate.cuh`` and ``threshold.cuh``: all entries that reach a threshold.

Up to 32 tensors share the launches. How many entries they send is known on the device alone, so the
host waits for it once, for one copy of four bytes a tensor, before the payloads are allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_entries
from ringlet.compressors.core.multitensor import Encoding, Sum
from ringlet.compressors.core.traits import Payload
from ringlet.compressors.kernels.cuda.common import scatter
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS
from ringlet.compressors.kernels.cuda.common.candidates import SEARCH, Candidates, Wanted
from ringlet.compressors.kernels.cuda.common.multitensor import rounded
from ringlet.compressors.kernels.cuda.common.scatter import Entries, Sparse
from ringlet.compressors.kernels.cuda.runtime.device import Device, Scratch
from ringlet.compressors.kernels.cuda.runtime.launch_table import MOST_SEGMENTS, PART
from ringlet.compressors.kernels.cuda.runtime.source import Program
from ringlet.compressors.kernels.cuda.sparsifiers.topk import Selected, largest

CHUNK = 1 << 16  # elements that are summed in one piece
PARTS = (
    "runtime/launch_table", "runtime/values", "runtime/scan", "common/candidates",
    "runtime/chunks", "sparsifiers/estimate", "sparsifiers/threshold",
)  # fmt: skip
KERNELS = (
    "begin", "draw", "adopt", "exceed", "fit", "collect", "survey", "decide", "cap", "widen",
    *SEARCH,
)  # fmt: skip
AIM = np.dtype([("key", "u8"), ("drawn", "u4"), ("rank", "u4"), ("value", "f8")])
New = Callable[[int, npt.DTypeLike], Array]


@dataclass(frozen=True)
class Given:
    """The threshold itself, of the values that are selected from."""

    threshold: float


@dataclass(frozen=True)
class Sample:
    """The magnitude at ``rank``, from 1 on, of ``drawn`` random entries, fewer than there are."""

    key: int
    drawn: int
    rank: int


@dataclass(frozen=True)
class Fit:
    """Exponential tails: a stage moves the threshold, 0 at first, by so many mean excesses."""

    weights: tuple[float, ...]


class Sought(NamedTuple):
    """One tensor to select from: flat and not empty, float32, float16, or bfloat16 as uint16.

    ``entries`` is how many are wanted, or with a threshold that is given the most that are
    taken; ``residual`` (float32) is used with feedback.
    """

    x: Array
    entries: int
    aim: Given | Sample | Fit
    residual: Array | None = None


def reaching(
    device: Device,
    tensors: Sequence[Sought],
    scratch: Scratch,
    new: New,
    decay: float = 1.0,
    scale: float = 1.0,
    flag: Array | None = None,
) -> list[tuple[Array, Array]]:
    """Return of each tensor the indices (uint32, ascending) and values (float32) that are taken.

    Selects from scale * x, or with residuals from scale * x + decay * residual; that sum becomes
    the residual where it is finite, and what is sent and finite is zeroed there. All tensors have
    a residual or none, one input dtype, and one kind of aim. ``scratch(name, n, dtype)`` and
    ``new(n, dtype)`` return uninitialised device memory; what is returned is new. ``flag`` (int32,
    one element) becomes 1 where something sent is not finite.
    """
    found: list[tuple[Array, Array]] = []
    for start in range(0, len(tensors), MOST_SEGMENTS):
        some = tensors[start : start + MOST_SEGMENTS]
        wanted = [Wanted(t.x, t.entries, t.residual) for t in some]
        code = program(INPUTS[some[0].x.dtype.name], int(some[0].residual is not None))
        candidates = Candidates(device, code, wanted, scratch, decay, scale, flag)
        _find_floors(candidates, [tensor.aim for tensor in some])
        candidates.launch("collect", "units")
        if isinstance(some[0].aim, Given):
            candidates.launch("cap", "launch")
        else:
            candidates.launch("survey", "units")
            candidates.launch("decide", "launch")
            candidates.launch("widen", "units")
        candidates.search()
        candidates.place()
        taken = device.read(candidates.memory["taken"])
        made = [(new(n, np.uint32), new(n, np.float32)) for n in taken.tolist()]
        candidates.emit(made)
        found += made
    return found


def program(input_: int, feedback: int) -> Program:
    """Return the program for an input dtype (see ``bucketed``), with feedback or without."""
    constants = (("BITS", 8), ("GROUP", 32), ("INPUT", input_), ("FEEDBACK", feedback))
    return Program(PARTS, KERNELS, constants)


def _find_floors(candidates: Candidates, aims: Sequence[Given | Sample | Fit]) -> None:
    """Launch what finds each tensor's threshold."""
    rows, stages = np.zeros(len(aims), AIM), 0
    for row, aim in zip(rows, aims, strict=True):
        if isinstance(aim, Given):
            row["value"] = aim.threshold
        elif isinstance(aim, Sample):
            row["key"], row["drawn"], row["rank"] = aim.key, aim.drawn, aim.rank
        else:
            stages = max(stages, len(aim.weights))
    candidates.set_parts(MOST_SEGMENTS, rows.view(PART))
    candidates.launch("begin", "tensors")
    if isinstance(aims[0], Sample):
        candidates.launch("draw", "units")
        candidates.search()
        candidates.launch("adopt", "launch")
    if stages:
        chunks = candidates.add_table("chunks", CHUNK)
        candidates.lay("sums", chunks, np.float64)
        candidates.lay("passing", chunks, np.uint32)
    for stage in range(stages):
        rows["value"] = [_weight(aim, stage) for aim in aims]
        candidates.set_parts(MOST_SEGMENTS, rows.view(PART))
        candidates.launch("exceed", "chunks")
        candidates.launch("fit", "chunks", len(aims))


def _weight(aim: Given | Sample | Fit, stage: int) -> float:
    """Return the weight of a stage; 0 where there is none."""
    return aim.weights[stage] if isinstance(aim, Fit) and stage < len(aim.weights) else 0.0


Seek = Callable[[Array, Array | None, Context], Sought | None]


class ThresholdSelections:
    """Kernels that select what reaches a threshold, which ``seek`` tells; the host waits once.

    ``seek(x, residual, ctx)`` returns None where the largest entries are wanted, ``count(n)`` many.
    """

    feeds: ClassVar[bool] = True

    def __init__(self, device: Device, seek: Seek, count: Callable[[int], int]) -> None:
        self._device, self._seek, self._count = device, seek, count

    def compress(
        self, tensors: Sequence[Encoding], scale: float = 1.0, decay: float = 1.0
    ) -> list[Payload]:
        """Select by thresholds, and exactly where there is none."""
        ctx = tensors[0].ctx
        scratch, empty = ctx.workspace.array, ctx.xp.empty
        payloads: list[Payload] = [{} for _ in tensors]
        sought: dict[int, Sought] = {}
        exact: list[Selected] = []
        for i, t in enumerate(tensors):
            assert t.x is not None, "sums of selections are not compressed again"
            found = self._seek(t.x, t.residual, t.ctx)
            if found is not None:
                sought[i] = found
                continue
            k = self._count(t.n)
            indices, values = empty(k, "uint32"), empty(k, "float32")
            payloads[i] = {"indices": indices, "values": values}
            exact.append(Selected(t.x, indices, values, t.residual))
        if exact:
            largest(self._device, exact, scratch, decay, scale)
        made = reaching(self._device, list(sought.values()), scratch, empty, decay, scale)
        for i, (indices, values) in zip(sought, made, strict=True):
            payloads[i] = {"indices": indices, "values": values}
        return payloads

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Clear outputs, and add the entries of one payload after the other."""
        address = self._device.address

        def entries(payload: Payload) -> Entries:
            indices, values = check_entries("a sum of entries", payload)
            return Entries(address(indices), address(values), values.size)

        def run(outs: Sequence[Array], factor: float) -> None:
            sparse = [
                Sparse(out, [entries(payload) for payload in t.payloads])
                for out, t in zip(outs, sums, strict=True)
            ]  # fmt: skip
            scatter.sums(self._device, sparse, factor)

        rounded(self._device, [t.out for t in sums], sums[0].ctx, scale, run)
