"""Checks of what takes many tensors in host memory a call.

See ``Compressor.batched`` and ``Compressor.batched_rounds``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringlet.compressors.base.batched import (
    VALUES,
    Batched,
    BatchedRounds,
    Exchanged,
    Row,
    addresses,
)
from ringlet.compressors.base.contract import Compressor, Payload
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.testing.checks.launches import Slots
from ringlet.compressors.testing.tools.equality import same, same_payload
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import by_payload, combined, context, simulate

_SCALE = 0.5
_RANKS, _STEPS = 3, 2
_MANY = 37
_SPOILED = 5  # the place of a tensor with NaN
_GAP = -7  # between tensors; an int8 holds the sum of all ranks'
_SHAPES = ((40, 30), (9, 200), (30, 40), (64, 6, 7), (17, 1300), (513,), (5,))


_Asked = tuple[str, str, tuple[int, ...]]  # in a round: the op, the dtype and each one's length


class _Tensor(NamedTuple):
    """A tensor, or a piece of one, of ``n`` elements from ``offset`` of ``numel`` on."""

    n: int
    offset: int
    numel: int
    state: State


@needs("fast_paths_agree", "fused_feedback_agrees")
def check_batched_tensors_agree(compressor: Compressor) -> None:
    """Kernels that take many tensors in host memory are for speed: what becomes of a tensor must
    not show which others were there.

    encode of batched() writes what encode_into writes, and renews residuals as that does, in both
    stages and step after step; decode writes scale times what sum_into gives. Each row tells where
    one tensor lies: take lengths, keys and offsets from its own, write nothing beyond its end, and
    let there be any number of rows. A piece is told of by the row of its whole tensor, moved by its
    elements, at multiples of the granularity. Return None from batched() where that is not so.
    Where sizes vary, encode writes what compress returns, and as many elements as that has into
    the columns behind the arrays' places; there is no more room than layout of batched() says.
    """
    if not by_payload(compressor):
        return
    kernels = compressor.batched()
    if kernels is None:
        return
    if kernels.varies:
        for what, lengths in _calls():
            with np.errstate(all="ignore"):
                _check_varying(compressor, kernels, _whole(lengths), what)
        return
    finishing = kernels.finishing is not None  # what is sent is remembered until then
    for stage in (1, 2) if compressor.traits().combine == "gather" and not finishing else (1,):
        for what, lengths in _calls():
            with np.errstate(all="ignore"):
                _check(compressor, kernels, _whole(lengths), stage, what)
    if not finishing:
        with np.errstate(all="ignore"):
            _check(compressor, kernels, _pieces(compressor), 1, "pieces of a tensor")


def _calls() -> list[tuple[str, Sequence[int]]]:
    many = [(k * k * 7 + 13 * k) % 391 + 1 for k in range(_MANY)]
    return [("three tensors", (100, 2049, 1)), (f"{_MANY} tensors", many)]


def _whole(lengths: Sequence[int]) -> list[_Tensor]:
    return [_Tensor(n, 0, n, {}) for n in lengths]


def _pieces(compressor: Compressor) -> list[_Tensor]:
    """Return pieces of one tensor, which end where its payload may be cut."""
    granule = compressor.traits().granularity
    if granule is None:
        return _whole([300])
    ends, state = [0, granule, 4 * granule, 4 * granule + max(1, granule // 2)], State()
    return [
        _Tensor(stop - start, start, ends[-1], state) for start, stop in itertools.pairwise(ends)
    ]


def _contexts(tensors: Sequence[_Tensor], step: int, stage: int) -> list[Context]:
    """Return contexts in which what was remembered goes on; pieces share their tensor's name."""
    first = tensors[0].state
    return [
        context(
            np.empty(tensor.numel, np.float32),
            tensor.state,
            name="layer" if tensor.state is first else f"layer{place}",
            offset=tensor.offset,
            step=step,
            stage=stage,
            size=_RANKS,
        )
        for place, tensor in enumerate(tensors)
    ]


def _rows(
    kernels: Batched, tensors: Sequence[_Tensor], xs: list[Array], around: list[Context]
) -> Sequence[Row] | Array:
    """Return a row of each tensor; those of pieces are moved, from one that tells of the whole."""
    first = tensors[0]
    if first.n == first.numel:
        return [kernels.values(x, ctx) for x, ctx in zip(xs, around, strict=True)]
    whole = np.array([kernels.row(0, first.numel, around[0])] * len(tensors), np.uint64)
    rows = kernels.moved(whole, np.array([tensor.offset for tensor in tensors], np.uint64))
    rows[:, VALUES] = [x.ctypes.data for x in xs]
    return rows


def _values(tensors: Sequence[_Tensor], seed: int) -> list[Array]:
    found = [gaussian(tensor.n, seed + place) for place, tensor in enumerate(tensors)]
    if len(found) > _SPOILED:
        found[_SPOILED][found[_SPOILED].size // 2] = np.nan
    return found


def _check(
    compressor: Compressor, kernels: Batched, tensors: list[_Tensor], stage: int, what: str
) -> None:
    lengths = [tensor.n for tensor in tensors]
    apart: list[_Tensor] = copy.deepcopy(tensors)  # pieces share a state here too
    for step in range(_STEPS):
        sent: list[list[Payload]] = []
        for rank in range(_RANKS):  # one behind the other, with one memory
            which = f"of {what}, in stage {stage} and {step + rank} calls before, "
            xs = _values(tensors, 100 * step + rank)
            slots, alone = Slots(compressor, lengths), Slots(compressor, lengths)
            around = _contexts(tensors, step, stage)
            kernels.encode_into(
                _rows(kernels, tensors, xs, around), kernels.table(slots.payloads, lengths)
            )
            assert slots.kept_between(), f"{which}one writes beyond its payload's arrays"
            own = _contexts(apart, step, stage)
            for x, payload, ctx in zip(xs, alone.payloads, own, strict=True):
                compressor.encode_into(x, payload, ctx)
            if kernels.finishing is not None:
                _finish_both(compressor, kernels, slots.payloads, around, own, which)
            pairs = zip(slots.payloads, alone.payloads, tensors, apart, strict=True)
            for place, (one, other, tensor, lone) in enumerate(pairs):
                assert same_payload(one, other), (
                    f"{which}number {place} is compressed to something else than on its own"
                )
                assert _same_memory(tensor.state, lone.state), (
                    f"{which}number {place} is remembered as something else than on its own"
                )
            sent.append(slots.payloads)
        _check_sums(compressor, kernels, tensors, sent, stage, what)


def _check_varying(
    compressor: Compressor, kernels: Batched, tensors: list[_Tensor], what: str
) -> None:
    lengths = [tensor.n for tensor in tensors]
    apart: list[_Tensor] = copy.deepcopy(tensors)
    for step in range(_STEPS):
        sent: list[list[Payload]] = []
        for rank in range(_RANKS):
            which = f"of {what}, {step + rank} calls before, "
            xs = _values(tensors, 100 * step + rank)
            around, own = _contexts(tensors, step, 1), _contexts(apart, step, 1)
            rooms = [_room(kernels, n) for n in lengths]
            inside = [{name: array[:-1] for name, array in room.items()} for room in rooms]
            table = kernels.table(inside, lengths)
            kernels.encode_into(_rows(kernels, tensors, xs, around), table)
            pairs = zip(rooms, inside, table[:, 2::2].tolist(), tensors, apart, strict=True)
            sent.append([])
            for place, (room, most, counts, tensor, lone) in enumerate(pairs):
                assert all(not array[-1] for array in room.values()), (
                    f"{which}number {place} is written beyond its room"
                )
                sizes = dict(zip(kernels.names, counts, strict=True))
                sent[-1].append({name: most[name][:size] for name, size in sizes.items()})
                assert same_payload(sent[-1][-1], compressor.compress(xs[place], own[place])), (
                    f"{which}number {place} is compressed to something else than on its own"
                )
                if kernels.finishing is None:
                    assert _same_memory(tensor.state, lone.state), (
                        f"{which}number {place} is remembered as something else than on its own"
                    )
            if kernels.finishing is not None:
                _finish_both(compressor, kernels, sent[-1], around, own, which)
        _check_sums(compressor, kernels, tensors, sent, 1, what)


def _room(kernels: Batched, n: int) -> Payload:
    """Return arrays (zeros) for a payload of variable size, with an element behind each."""
    return {part.name: np.zeros(part.elements + 1, part.dtype) for part in kernels.layout(n)}


def _finish_both(
    compressor: Compressor,
    kernels: Batched,
    payloads: list[Payload],
    around: list[Context],
    own: list[Context],
    which: str,
) -> None:
    """Let kernels, and ``finish``, see the result of one rank, which is what it has sent."""
    assert kernels.finishing is not None
    decoded = [np.empty(ctx.numel, np.float32) for ctx in around]
    for payload, out, ctx in zip(payloads, decoded, around, strict=True):
        compressor.decompress(payload, out, ctx)
    outs, expected = ([out.copy() for out in decoded] for _ in range(2))
    rows = [kernels.finishing.row(ctx.numel, ctx) for ctx in around]
    given = (
        rows,
        [out.size for out in outs],
        *([o.ctypes.data for o in x] for x in (outs, decoded)),
    )
    kernels.finishing.finish(*(np.array(each, np.uint64) for each in given))
    for place, (out, wanted, ctx) in enumerate(zip(outs, expected, own, strict=True)):
        compressor.finish(wanted, ctx)
        assert same(out, wanted), f"{which}number {place} is finished otherwise than on its own"


def _check_sums(
    compressor: Compressor,
    kernels: Batched,
    tensors: list[_Tensor],
    sent: list[list[Payload]],
    stage: int,
    what: str,
) -> None:
    lengths = [tensor.n for tensor in tensors]
    ends = np.cumsum([0, *(n + 1 for n in lengths)])  # with a value between them
    room = np.full(ends[-1], -77, np.float32)
    outs = [room[a : a + n] for a, n in zip(ends, lengths, strict=False)]
    tables = [kernels.table(payloads, lengths) for payloads in sent]
    around = _contexts(tensors, 0, stage)
    drawn = [kernels.decode_row(n, ctx) for n, ctx in zip(lengths, around, strict=True)]
    kernels.sum_into([out.ctypes.data for out in outs], tables, _SCALE, drawn)
    assert (room[ends[1:] - 1] == -77).all(), f"of {what} one is decoded beyond its end"
    for place, (out, ctx) in enumerate(zip(outs, around, strict=True)):
        expected = np.empty(out.size, np.float32)
        compressor.sum_into([payloads[place] for payloads in sent], expected, ctx)
        assert same(out, expected * np.float32(_SCALE)), (
            f"of {what} number {place} decodes to something else than on its own, from {_RANKS} "
            f"payloads, with scale={_SCALE}"
        )


@needs("mean_of_equal_gradients")
def check_batched_rounds_agree(compressor: Compressor) -> None:
    """Exchanges of many tensors together are for speed: what becomes of a tensor must not show
    which others were there, for another rank may exchange it on its own.

    batched_rounds() combines as many values of each tensor in each round as exchange does, in
    the same way, and leaves the same results, residuals and memory. Take each tensor's shape and
    context from its own, and write nothing but its values at its place. Return None where that is
    not so.
    """
    kernels = compressor.batched_rounds()
    shapes = [] if kernels is None else [shape for shape in _SHAPES if kernels.takes(shape)]
    if kernels is None or not shapes:
        return
    states: list[list[State]] = [[{} for _ in shapes] for _ in range(_RANKS)]
    alone = copy.deepcopy(states)
    for step in range(_STEPS + 1):
        xs = [
            [
                gaussian(int(np.prod(shape)), 100 * step + 10 * rank + i)
                for i, shape in enumerate(shapes)
            ]
            for rank in range(_RANKS)
        ]
        if step == 1:
            xs[0][0][3] = np.nan
        outs, exchanged = _exchanged(kernels, shapes, xs, states, step)
        for place, shape in enumerate(shapes):
            which = f"of {len(shapes)} tensors, {step} steps before, number {place} {list(shape)}"
            rounds: list[tuple[str, str, int]] = []
            gradients = [own[place] for own in xs]
            held = [own[place] for own in alone]
            expected = simulate(
                compressor, gradients, held, step, f"layer{place}", shape, rounds=rounds
            )
            wanted = [(op, dtype, lengths[place]) for op, dtype, lengths in exchanged]
            assert rounds == wanted, f"{which} exchanges {wanted}, on its own {rounds}"
            for rank in range(_RANKS):
                assert same(outs[rank][place], expected[rank]), (
                    f"{which} becomes something else than on its own"
                )
                assert _same_memory(states[rank][place], held[rank]), (
                    f"{which} is remembered as something else than on its own"
                )


def _exchanged(
    kernels: BatchedRounds,
    shapes: Sequence[tuple[int, ...]],
    xs: list[list[Array]],
    states: list[list[State]],
    step: int,
) -> tuple[list[list[Array]], list[_Asked]]:
    """Return every rank's results, and by round the op, the dtype and each tensor's length."""
    outs = [[np.full(x.size, np.nan, np.float32) for x in own] for own in xs]
    running = []
    for rank, (own, results) in enumerate(zip(xs, outs, strict=True)):
        around = [
            context(x, state, shape=s, name=f"layer{i}", step=step, rank=rank, size=_RANKS)
            for i, (x, state, s) in enumerate(zip(own, states[rank], shapes, strict=True))
        ]
        tensors = [Exchanged(*each) for each in zip(own, results, around, strict=True)]
        running.append(kernels.exchange(tensors))
    exchanged: list[_Asked] = []
    rounds = [next(each) for each in running]
    buffers: list[Array] = []
    while True:
        before = buffers  # what they hold is read while the next values are written
        kinds = {(asked.op, asked.dtype, tuple(asked.lengths)) for asked in rounds}
        assert len(kinds) == 1, f"ranks exchange different things in one round: {kinds}"
        ((op, dtype, lengths),) = kinds
        exchanged.append((op, dtype, lengths))
        # With a value between them, and around.
        ends = np.cumsum([1, *(n + 1 for n in lengths)])
        buffers = [np.full(ends[-1], _GAP, dtype) for _ in running]
        places = [addresses(buffer, ends[:-1]) for buffer in buffers]
        for asked, where, buffer in zip(rounds, places, buffers, strict=True):
            asked.write(where)
            between = buffer[ends - 1]
            assert (between == _GAP).all(), "one of many tensors writes beyond its values"
        for old in before:
            old[:] = np.nan if old.dtype.kind == "f" else _GAP
        together = combined(buffers, op)
        for buffer in buffers:
            buffer[:] = together
        rounds, over = [], 0
        for each, where in zip(running, places, strict=True):
            try:
                rounds.append(each.send(where))
            except StopIteration:
                over += 1
        if over:
            assert over == len(running), "some ranks exchange another round, others do not"
            return outs, exchanged


def _same_memory(one: State, other: State) -> bool:
    kept, wanted = _memory(one), _memory(other)
    return kept.keys() == wanted.keys() and all(same(kept[name], wanted[name]) for name in kept)


def _memory(state: State, within: str = "") -> dict[str, Array]:
    """Return what is remembered, also in the states that a chain keeps for its second side."""
    found: dict[str, Array] = {}
    for name, held in state.items():
        if isinstance(held, dict):
            found |= _memory(held, f"{within}{name}/")
        else:
            found[within + name] = np.asarray(held)
    return found


CHECKS = (check_batched_tensors_agree, check_batched_rounds_agree)
