"""Operations that are not fused, as steps of the engine's pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ringlet.fusion.devices.convert import combined_as, scale_into
from ringlet.fusion.devices.host import Place
from ringlet.fusion.peers import Track
from ringlet.fusion.requests.handle import Work
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array, storage
from ringlet.ring.pipeline import Steps, Wire
from ringlet.ring.rank_order import even_counts


def single_steps(track: Track, work: Work, sizes: Sequence[Any], place: Place) -> Steps:
    """Run an operation that is not fused and leave its result in ``work``.

    ``sizes`` are the first dimensions of an all-gather's inputs, or an all-to-all's splits, by
    rank; empty means that all are like this rank's own. A result of another size than the input
    lies in what ``work.output`` returns for that size if it can be called, else in new memory.
    """
    steps = _OPERATIONS[work.request.kind](track, work, sizes, place)
    return place.steps(_in_order(work, place, steps)) if place.ordered else steps


def _in_order(work: Work, place: Place, steps: Steps) -> Steps:
    place.after([work.ready])
    yield from steps
    mark = place.done([work.input, work.output])
    if mark is not None:
        work.let_go(mark)


def _broadcast(track: Track, work: Work, _: Sequence[Any], __: Place) -> Steps:
    if work.output is not work.input and track.comm.rank == work.request.root:
        work.output[...] = work.input
    yield Wire(partial(track.comm.broadcast, work.output, work.request.root))


def _barrier(track: Track, work: Work, _: Sequence[Any], __: Place) -> Steps:
    yield Wire(track.comm.barrier)


def _allgather(track: Track, work: Work, sizes: Sequence[Any], place: Place) -> Steps:
    shape = work.request.shape
    rows = list(sizes) or [shape[0]] * track.comm.size
    width = math.prod(shape[1:])
    work.sizes = tuple(rows)
    work.output = _room(work, sum(rows) * width, place)
    counts = [n * width for n in rows]
    yield Wire(partial(track.comm.allgather, work.input, work.output, counts))


def _alltoall(track: Track, work: Work, sizes: Sequence[Any], place: Place) -> Steps:
    request = work.request
    width = math.prod(request.shape[1:])
    received = [
        splits[track.comm.rank] for splits in list(sizes) or [request.splits] * track.comm.size
    ]
    work.sizes = tuple(received)
    work.output = _room(work, sum(received) * width, place)
    outgoing, incoming = [n * width for n in request.splits], [n * width for n in received]
    yield Wire(partial(track.comm.alltoall, work.input, work.output, outgoing, incoming))


def _reducescatter(track: Track, work: Work, _: Sequence[Any], place: Place) -> Steps:
    request, scratch = work.request, place.workspace
    width = math.prod(request.shape[1:])
    rows = even_counts(request.shape[0], track.comm.size)
    work.sizes = tuple(rows)
    average, dtype = request.op is ReduceOp.AVERAGE, request.dtype
    early = average and dtype == "float16"  # whose sum may not fit, as in an allreduce
    prescale = request.prescale / track.comm.size if early else request.prescale
    divisor = track.comm.size if average and not early else 1
    wire = combined_as(dtype, request.op)
    values = work.input
    if prescale != 1.0 or wire != dtype:
        values = place.xp.empty(work.input.size, storage(wire))
        scale_into(work.input, prescale, values, dtype, scratch)
    out = work.output = _room(work, rows[track.comm.rank] * width, place)
    sums = out if wire == dtype else place.xp.empty(out.size, storage(wire))
    op = ReduceOp.SUM if average else request.op
    counts = [n * width for n in rows]
    yield Wire(partial(track.comm.reduce_scatter, values, sums, counts, op, wire))
    scale_into(sums, request.postscale, out, dtype, scratch, divisor)


def _room(work: Work, numel: int, place: Place) -> Array:
    make = work.output if callable(work.output) else partial(place.xp.empty, dtype=work.input.dtype)
    made: Array = make(numel)
    return made


_OPERATIONS: dict[str, Callable[[Track, Work, Sequence[Any], Place], Steps]] = {
    "broadcast": _broadcast,
    "barrier": _barrier,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
