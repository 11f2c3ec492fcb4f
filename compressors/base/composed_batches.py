"""Kernels for many tensors a call, made of others: those of a chain, and feedback around a kernel.

What stands between two of them, a chain's values or a target, lies in scratch of a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ringlet.compressors.base.batched import (
    ARRAYS,
    KEY,
    LENGTH,
    OWN,
    RESIDUAL,
    SECOND,
    VALUES,
    Batched,
    Kernel,
    Key,
    addresses,
    runs,
    starts_of,
)
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.traits import Part

Widening = Callable[[Array, Array, Array], None]

_ONE = np.float32(1)


def fed_back(kernels: Batched) -> Kernel:
    """Return ``encode_fed`` of a ``Batched`` without, as ``Compressor.feedback_into`` does it.

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
            kernels.encode(plain, sent, _ONE)
            kernels.decode_rows(outs, sent[None], _ONE, plain)
            feedback.keep_many(own, sent, places, outs)

    return encode_fed


def narrowed(encode_fed: Kernel, widen: Widening, narrow: Widening) -> Kernel:
    """Return ``encode_fed`` of a ``Batched`` for residuals of which rows tell in fewer bits.

    ``widen(tensors, payloads, places)`` is called before it, with the addresses of float32
    residuals, and ``narrow`` behind it.
    """

    def encode_kept(tensors: Array, payloads: Array, decay: np.float32) -> None:
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            starts, total = _laid_out(sent[:, LENGTH])
            wide = np.empty(total, np.float32)
            places = addresses(wide, starts)
            widen(own, sent, places)
            lent = own.copy()
            lent[:, RESIDUAL] = places
            encode_fed(lent, sent, decay)
            narrow(own, sent, places)

    return encode_kept


def with_momentum(kernels: Batched, momentum: float, masking: bool) -> Kernel:
    """Return ``encode_fed`` of a ``Batched`` for ``momentum_correction``, whose residual is v.

    The second memory is u; where there is none, what is lost is kept in v alone.
    """
    from ringlet.compressors.kernels.cpu.modifiers import state_updates

    weight, encode_fed = np.float32(momentum), kernels.encode_fed or fed_back(kernels)

    def encode_advanced(tensors: Array, payloads: Array, decay: np.float32) -> None:
        if not tensors[0, SECOND]:
            encode_fed(tensors, payloads, _ONE)
            return
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            starts, total = _laid_out(sent[:, LENGTH])
            advanced, decoded = np.empty(total, np.float32), np.empty(total, np.float32)
            places, outs = addresses(advanced, starts), addresses(decoded, starts)
            state_updates.advance_many(own, sent, weight, places)
            moved = own.copy()
            moved[:, VALUES] = places
            encode_fed(moved, sent, _ONE)
            kernels.decode_rows(outs, sent[None], _ONE, moved)
            state_updates.settle_many(own, sent, places, outs, masking)

    return encode_advanced


def changes(kernels: Batched) -> Kernel:
    """Return ``encode_fed`` of a ``Batched`` for EF21, which encodes what has changed.

    The residual is what is known of the values; a second memory is added to these.
    """
    from ringlet.compressors.kernels.cpu.modifiers import state_updates

    def encode_changes(tensors: Array, payloads: Array, decay: np.float32) -> None:
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            starts, total = _laid_out(sent[:, LENGTH])
            difference = np.empty(total, np.float32)
            plain = own.copy()
            plain[:, VALUES] = addresses(difference, starts)
            plain[:, RESIDUAL] = plain[:, SECOND] = 0
            state_updates.differ_many(own, sent, plain[:, VALUES])
            kernels.encode(plain, sent, _ONE)

    return encode_changes


def rotated(kernels: Batched, block: int, key: Key) -> Batched:
    """Return the kernels of a compressor behind a Hadamard rotation, whose signs ``key`` draws.

    ``kernels`` remember nothing, and draw, if they do, by the tensor's own key.
    """
    from ringlet.compressors.kernels.cpu.modifiers import hadamard

    def encode(tensors: Array, payloads: Array, decay: np.float32) -> None:
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            starts, total = _laid_out(sent[:, LENGTH])
            turned = np.empty(total, np.float32)
            given = own.copy()
            given[:, KEY] = own[:, OWN]
            given[:, VALUES] = addresses(turned, starts)
            hadamard.rotate_many(own, sent, block, given[:, VALUES])
            kernels.encode(given, sent, decay)

    def decode(outs: Array, payloads: Array, scale: np.float32, rows: Array) -> bool:
        if kernels.decode(outs, payloads, _ONE) is False:
            return False
        hadamard.restore_many(rows, payloads[0], block, scale, outs)
        return True

    return kernels._replace(
        encode=encode, encode_fed=None, decode=decode, draws=True, key=key, keyed=True,
        draws_own=kernels.draws,
    )  # fmt: skip


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
    of ``n``. None where the payload has too many arrays or one whose size varies, where both draw
    random numbers, or one to decode.
    """
    if first.varies or second.varies:
        return None
    outer = [name for name in first.names if name != part]
    names = (*outer, *(f"{part}.{name}" for name in second.names))
    if len(names) > ARRAYS or (first.draws and second.draws) or first.keyed or second.keyed:
        return None
    column = {name: 1 + place for place, name in enumerate(first.names)}
    chain = _Chain(first, second, cache(count), column[part], [column[name] for name in outer])
    drawing = first.draws or second.draws
    return Batched(label, layout, names, chain.encode, None, chain.decode, drawing, key=chain.key)


class _Chain(NamedTuple):
    """The kernels of both sides.

    In first's row of a payload the values' place is in the column ``values_in``, and the chain's
    own arrays, from its first column on, are in those of ``outer``; behind them are second's.
    """

    first: Batched
    second: Batched
    count: Callable[[int], int]
    values_in: int
    outer: Sequence[int]

    def encode(self, tensors: Array, payloads: Array, decay: np.float32) -> None:
        """Encode tensors with first, then its values with second."""
        for rows in runs(payloads[:, LENGTH]):
            own, sent = tensors[rows], payloads[rows]
            lengths = self._counts(sent[:, LENGTH])
            starts, total = _laid_out(lengths)
            values = np.empty(total, np.float32)
            places = addresses(values, starts)
            self.first.encode(own, self._first_rows(sent, places), decay)
            given = np.zeros_like(own)  # a chain's payload is of a whole tensor: all begin at 0
            given[:, VALUES], given[:, KEY] = places, own[:, KEY]
            self.second.encode(given, self._second_rows(sent, lengths), _ONE)

    def decode(self, outs: Array, payloads: Array, scale: np.float32) -> bool:
        """Decode second's arrays into first's values, then those; False for an index beyond."""
        for rows in runs(payloads[0, :, LENGTH]):
            sent = np.ascontiguousarray(payloads[:, rows])
            lengths = np.broadcast_to(self._counts(sent[0, :, LENGTH]), sent.shape[:2])
            starts, total = _laid_out(lengths.ravel())
            values = np.empty(total, np.float32)
            places = addresses(values, starts)
            inner = self._second_rows(sent, lengths).reshape(1, -1, 1 + ARRAYS)
            if self.second.decode(places, inner, _ONE) is False:
                return False
            outer = self._first_rows(sent, places.reshape(lengths.shape))
            if self.first.decode(outs[rows], outer, scale) is False:
                return False
        return True

    def key(self, n: int, ctx: Context) -> int:
        """Return the key of the side that draws."""
        if self.first.draws:
            return self.first.key(n, ctx)
        return self.second.key(self.count(n), ctx.child("chain", self.count(n)))

    def _counts(self, lengths: Array) -> Array:
        return np.array([self.count(n) for n in lengths.tolist()], np.uint64)

    def _first_rows(self, payloads: Array, places: Array) -> Array:
        """Return first's rows of payloads whose values lie at ``places``."""
        rows = np.zeros_like(payloads)
        rows[..., LENGTH], rows[..., self.values_in] = payloads[..., LENGTH], places
        rows[..., self.outer] = payloads[..., 1 : 1 + len(self.outer)]
        return rows

    def _second_rows(self, payloads: Array, lengths: Array) -> Array:
        """Return second's rows of payloads, of so many values."""
        rows, arrays, before = np.zeros_like(payloads), len(self.second.names), len(self.outer)
        rows[..., LENGTH] = lengths
        rows[..., 1 : 1 + arrays] = payloads[..., 1 + before : 1 + before + arrays]
        return rows


def _laid_out(lengths: Array) -> tuple[Array, int]:
    """Return where pieces begin that lie one behind the other, and how long they are together."""
    return starts_of(lengths), int(lengths.sum())
