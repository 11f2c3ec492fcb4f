"""Kernels for many tensors a call, made of others: those of a chain, and feedback around a kernel.

What stands between two of them, a chain's values or a target, lies in scratch of a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ringlet.compressors.base.batched import (
    ARRAYS,
    KEY,
    LENGTH,
    RESIDUAL,
    VALUES,
    Batched,
    Kernel,
    addresses,
    runs,
    starts_of,
)
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.traits import Part

_ONE = np.float32(1)


def fed_back(encode: Kernel, decode: Kernel) -> Kernel:
    """Return ``encode_fed`` of a ``Batched``, as ``Compressor.feedback_into`` does it.

    x + decay * e is encoded, and decoded again; e keeps the difference where it is finite.
    """
    from ringlet.compressors.kernels.cpu.common import feedback

    def encode_fed(tensors: Array, payloads: Array, decay: np.float32) -> None:
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            starts, total = _laid_out(sent[:, LENGTH])
            target, decoded = np.empty(total, np.float32), np.empty(total, np.float32)
            places, outs = addresses(target, starts), addresses(decoded, starts)
            feedback.add_many(own, sent, decay, places)
            plain = own.copy()
            plain[:, VALUES], plain[:, RESIDUAL] = places, 0
            encode(plain, sent, _ONE)
            decode(outs, sent[None], _ONE)
            feedback.keep_many(own, sent, places, outs)

    return encode_fed


def chained(
    label: Callable[[], str],
    layout: Callable[[int], Sequence[Part]],
    part: str,
    count: Callable[[int], int],
    first: Batched,
    second: Batched,
) -> Batched | None:
    """Return the kernels of ``first | second``, of which neither remembers anything.

    ``part`` names first's array that second compresses, which has ``count(n)`` values for a tensor
    of ``n``. None where the payload has too many arrays, or where both draw random numbers.
    """
    names = [name for name in first.names if name != part]
    inner = [f"{part}.{name}" for name in second.names]
    if len(names) + len(inner) > ARRAYS or (first.draws and second.draws):
        return None
    # Columns of a payload's row: the chain's own, and first's, in which the values have a place.
    mine = [1 + place for place in range(len(names))]
    theirs = [1 + first.names.index(name) for name in names]
    values_in = 1 + first.names.index(part)
    counts: dict[int, int] = {}

    def counted(lengths: Array) -> Array:
        for n in lengths.tolist():
            if n not in counts:
                counts[n] = count(n)
        return np.array([counts[n] for n in lengths.tolist()], np.uint64)

    def outer_rows(payloads: Array, places: Array) -> Array:
        """Return first's rows of payloads whose values lie at ``places``."""
        rows = np.zeros_like(payloads)
        rows[..., LENGTH], rows[..., values_in] = payloads[..., LENGTH], places
        rows[..., theirs] = payloads[..., mine]
        return rows

    def inner_rows(payloads: Array, lengths: Array) -> Array:
        """Return second's rows of payloads, of so many values."""
        rows = np.zeros_like(payloads)
        rows[..., LENGTH] = lengths
        rows[..., 1 : 1 + len(inner)] = payloads[..., 1 + len(names) : 1 + len(names) + len(inner)]
        return rows

    def encode(tensors: Array, payloads: Array, decay: np.float32) -> None:
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            lengths = counted(sent[:, LENGTH])
            starts, total = _laid_out(lengths)
            values = np.empty(total, np.float32)
            places = addresses(values, starts)
            first.encode(own, outer_rows(sent, places), decay)
            given = np.zeros_like(own)  # a chain's payload is of a whole tensor: all begin at 0
            given[:, VALUES], given[:, KEY] = places, own[:, KEY]
            second.encode(given, inner_rows(sent, lengths), _ONE)

    def decode(outs: Array, payloads: Array, scale: np.float32) -> bool | None:
        for rows in runs(payloads[0, :, LENGTH]):
            sent = np.ascontiguousarray(payloads[:, rows])
            lengths = np.broadcast_to(counted(sent[0, :, LENGTH]), sent.shape[:2])
            starts, total = _laid_out(lengths.ravel())
            values = np.empty(total, np.float32)
            places = addresses(values, starts)
            inside = inner_rows(sent, lengths).reshape(1, -1, 1 + ARRAYS)
            if second.decode(places, inside, _ONE) is False:
                return False
            outside = outer_rows(sent, places.reshape(lengths.shape))
            if first.decode(outs[rows], outside, scale) is False:
                return False
        return True

    def key(n: int, ctx: Context) -> int:
        if first.draws:
            return first.key(n, ctx)
        return second.key(count(n), ctx.child("chain", count(n)))

    drawing = first.draws or second.draws
    return Batched(label, layout, (*names, *inner), encode, None, decode, drawing, key=key)


def _laid_out(lengths: Array) -> tuple[Array, int]:
    """Return where pieces begin that lie one behind the other, and how long they are together."""
    return starts_of(lengths), int(lengths.sum())
