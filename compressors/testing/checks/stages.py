"""Checks of scatter-reduce: pieces of a tensor, and sums that are compressed once more."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.testing.tools.equality import same
from ringlet.compressors.testing.tools.inputs import gaussian, heavy_tailed, large
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import by_payload, context, decode, encode, scatter

_STEPS = 8
_N = 1500
_SCRATCH = 1 << 22  # bytes: more than a piece takes, and less than what lies before it
_SMALLER = -12  # the power of two by which each cell is smaller than the one before
_FAR_APART = (
    f", where each cell is 2^{_SMALLER} times as large as the one before: leave nothing out "
    "because it is small beside the largest value of x, which a piece does not know"
)
_FAR = 1 << 16  # an offset beyond what 16 bits count
_WHOLE = 1 << 20  # elements of a tensor that is cut into short pieces
_GRADIENTS, _COMMON = 16, 4.0  # what is always rounded down adds up to 12 times


@needs(
    *PURE,
    "decoding_is_the_same_everywhere",
    "contraction",
    "the_last_element_counts",
    "padding_does_not_leak",
)
def check_granularity(compressor: Compressor) -> None:
    """Scatter-reduce compresses shards: pieces cut at the granularity must give what the whole
    tensor's payload has there, or results would depend on the number of ranks.

    Declare a multiple of what shares a scale, or None. Size arrays by x.size, not by ctx.numel or
    ctx.shape, which are the whole tensor's. Draw random numbers per element from ctx.uniform(n),
    which knows ctx.offset; ctx.rng() begins anew in every piece.
    """
    granule = compressor.traits().granularity
    if granule is None or not by_payload(compressor):
        return
    # The next cell is a quarter as large: what looks at its neighbours would see it. Where cells
    # become ever smaller, so does what is left out because there is something larger elsewhere.
    quarters = [(n, -2, 4) for n in (0, 1, granule, 3 * granule + 1, 5 * granule, 2000)]
    for n, power, period in (*quarters, (5 * granule, _SMALLER, 5)):
        x = np.ldexp(heavy_tailed(n, n), power * (np.arange(n) // granule % period))
        # A piece is told the shape of the whole tensor, which may have any number of dimensions.
        shape = (40, 50) if n == 2000 else (n,)
        at = _piece(shape, 0)
        whole = decode(compressor, encode(compressor, x, at), n, at)
        for cut in (0, granule, 2 * granule, 3 * granule, 4 * granule):
            if cut > n:
                continue
            pieces = []
            for start, stop in ((0, cut), (cut, n)):
                at = _piece(shape, start)
                payload = encode(compressor, x[start:stop].copy(), at)
                pieces.append(decode(compressor, payload, stop - start, _piece(shape, start)))
            assert same(np.concatenate(pieces), whole), (
                f"{n} elements cut at {cut} decode to something else than the whole"
                + _FAR_APART * (power == _SMALLER)
            )
    _check_pieces_of_a_large_one(compressor, granule)
    if not compressor.traits().stateful:  # what is remembered is as long as the tensor
        _check_far_pieces(compressor, granule)


def _check_pieces_of_a_large_one(compressor: Compressor, granule: int) -> None:
    """Raise AssertionError where short pieces of a long tensor are something else than the whole.

    Blocks may be longer in long tensors, and a piece knows its own length alone.
    """
    n, few = _WHOLE, -(-_N // granule) * granule
    if 2 * few > n:
        return
    x, shape = large()[:n].copy(), (n,)
    at = _piece(shape, 0)
    whole = decode(compressor, encode(compressor, x, at), n, at)
    for start in (0, n // 2 // granule * granule):
        at, stop = _piece(shape, start), start + few
        out = decode(compressor, encode(compressor, x[start:stop].copy(), at), few, at)
        assert same(out, whole[start:stop]), (
            f"elements from {start} to {stop} of {n} decode to something else where they are "
            "compressed alone: what shares a scale must not go by how long a tensor is"
        )


def _check_far_pieces(compressor: Compressor, granule: int) -> None:
    """Raise AssertionError where pieces far into a tensor lose more than its first one."""
    x, lost, taken = gaussian(_N, 1), {}, 0
    for least in (0, 1 << 16, 1 << 24, 1 << 33):
        if least > 1 << 24 and taken > _SCRATCH:
            break  # it draws all numbers from the first element on: there is no room for so many
        start = -(-least // granule) * granule
        at = Context(shape=(start + _N,), numel=start + _N, offset=start, step=3)
        with _counted() as counts:
            out = decode(compressor, encode(compressor, x, at), _N, at)
        (taken,) = counts
        lost[start] = float(np.linalg.norm(out - x.astype(float)) / np.linalg.norm(x))
        assert lost[start] <= 1.5 * lost[0] + 1e-6, (
            f"a piece at ctx.offset {start} is off by {lost[start]:.3g} of its length, the first "
            f"one by {lost[0]:.3g}: keep the offset out of integers of 32 bits and fewer, and out "
            "of float32"
        )
    start = -(-_FAR // granule) * granule
    if start > 2 * _FAR:
        return
    long = gaussian(start + _N, 2)
    found = []
    for first in (0, start):
        at = Context(shape=long.shape, numel=long.size, offset=first, step=3)
        piece = long[first:].copy()
        found.append(decode(compressor, encode(compressor, piece, at), piece.size, at))
    assert same(found[0][start:], found[1]), (
        f"a piece at ctx.offset {start} decodes to something else than the whole has there: draw "
        "from ctx.uniform(n), which knows the whole offset"
    )


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Append how many bytes of Python's and NumPy's were held at most in the with-block."""
    found: list[int] = []
    ours = not tracemalloc.is_tracing()
    if ours:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        yield found
    finally:
        found.append(tracemalloc.get_traced_memory()[1] - before)
        if ours:
            tracemalloc.stop()


@needs("granularity")
def check_pieces_remember_their_own(compressor: Compressor) -> None:
    """Where a tensor is cut, its pieces have one ctx.state: what one of them remembers must not be
    taken for another's.

    Keep ctx.numel elements, and use those from ctx.offset on: kept[ctx.offset : ctx.offset +
    x.size].
    """
    traits = compressor.traits()
    if traits.granularity is None or not traits.stateful or not by_payload(compressor):
        return
    n, cut = 5 * traits.granularity, 2 * traits.granularity
    kept: list[dict[str, Any]] = [{}, {}]
    for step in range(3):
        x = heavy_tailed(n, step)
        whole = _remembering(compressor, x, 0, n, kept[0], step)
        pieces = [
            _remembering(compressor, x, start, stop, kept[1], step)
            for start, stop in ((0, cut), (cut, n))
        ]
        assert same(np.concatenate(pieces), whole), (
            f"in step {step} {n} elements cut at {cut} decode to something else than the whole"
        )


def _remembering(
    compressor: Compressor, x: Array, start: int, stop: int, state: dict[str, Any], step: int
) -> Array:
    ctx = context(x, state, offset=start, step=step)
    payload = encode(compressor, x[start:stop].copy(), ctx)
    return decode(compressor, payload, stop - start, ctx)


@needs(
    "granularity",
    "pieces_remember_their_own",
    "points_the_same_way",
    "decoding_is_the_same_everywhere",
    "unbiased",
)
def check_second_stage(compressor: Compressor) -> None:
    """In a scatter-reduce the owner of a shard compresses the mean of what all have sent, as
    ctx.stage 2: that must lose no more than the first stage, and be the same for everybody.

    Compress what is given, whatever the stage: it is a mean already, of ctx.numel elements, and
    the payload's layout is the same.
    """
    traits = compressor.at(0).traits()
    if traits.granularity is None or traits.combine != "gather" or not traits.fixed_size:
        return
    now = compressor.at(0)
    lost = np.zeros(2)
    for step in range(_STEPS):
        x = heavy_tailed(_N, step)
        for stage in (1, 2):
            ctx = context(x, size=3, step=0 if traits.stateful else step, stage=stage, seed=step)
            out = decode(now, encode(now, x, ctx), _N, ctx)
            lost[stage - 1] += (
                np.square(out - x.astype(float)).sum() / np.square(x, dtype=float).sum()
            )
    first, second = np.sqrt(lost / _STEPS)
    assert second <= 1.5 * first + 2e-3, (
        f"compressing as ctx.stage 2 is off by {second:.3g} ||x||, as stage 1 by {first:.3g}"
    )
    if not traits.stateful:
        one, two = (_common(now, stage) for stage in (1, 2))
        assert two <= _COMMON * max(one, 1), (
            f"errors of {_GRADIENTS} gradients that are independent add up to {two:.3g} times the "
            f"energy that luck explains as ctx.stage 2, as stage 1 to {one:.3g} times: they go the "
            "same way, as if noise were left out"
        )
    for size in (2, 3):
        states: list[dict[str, Any]] = [{} for _ in range(size)]
        for step in range(3):
            gradients = [gaussian(_N, 10 * step + rank) for rank in range(size)]
            outs = scatter(compressor, gradients, states, step)
            assert all(same(out, outs[0]) for out in outs), (
                f"after a scatter-reduce {size} ranks hold different results"
            )
            assert np.isfinite(outs[0]).all(), f"a scatter-reduce of {size} ranks gives NaN or Inf"


def _common(now: Compressor, stage: int) -> float:
    """Return how much more energy the sum of errors has than luck explains."""
    total, energy = np.zeros(_N), 0.0
    for turn in range(_GRADIENTS):
        x = gaussian(_N, turn)
        ctx = context(x, size=3, step=turn, stage=stage)
        error = decode(now, encode(now, x, ctx), _N, ctx) - x.astype(float)
        total += error
        energy += float(np.square(error).sum())
    return float(np.square(total).sum()) / (energy or 1.0)


def _piece(shape: tuple[int, ...], offset: int) -> Context:
    return Context(shape=shape, numel=int(np.prod(shape)), offset=offset, step=3)


CHECKS = (check_granularity, check_pieces_remember_their_own, check_second_stage)
