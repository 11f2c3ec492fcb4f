"""Adasum: gradients that agree are averaged, gradients that are orthogonal are summed.

Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021. Two vectors a
and b combine to

    (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

and W of them pair by pair in a binary tree: ranks 0 and 1, 2 and 3, ..., then the results of
ranks 0-1 and 2-3, and so on. Vector-halving distance-doubling does that with the bytes of one
allreduce: at every level a rank sends half of what it holds to its partner and combines the other
half, and only the dot products (three float64 a tensor) are summed over the ranks of the pair.

Where W is no power of two, let p be the largest one below it: rank p + r is combined with rank r
first, and receives the result at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlet.ring.arguments import flat
from ringlet.ring.communicator import Communicator
from ringlet.ring.dtypes import FLOATS, Array, dtype_name
from ringlet.ring.float16 import HALVES, kernels
from ringlet.ring.rank_order import Scratch

TINY = float(np.sqrt(np.finfo(np.float64).tiny))  # a squared norm below it counts as zero


def adasum(
    comm: Communicator,
    buffer: Array,
    ends: Sequence[int],
    dtype: str | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Combine every tensor of ``buffer`` (flat, n elements) over all ranks by Adasum, in place.

    Tensor i lies in ``buffer[ends[i] : ends[i + 1]]``: ``ends`` ascends from 0 to n. Elements are
    float16, bfloat16 (held as uint16, ``dtype="bfloat16"``), float32 or float64; dot products are
    taken in float64, and 16-bit elements are combined in float32 and rounded at every level. A
    vector whose squared norm is below 1.5e-154 counts with the coefficient 1. The result is
    bit-identical on all ranks. ``scratch`` keeps the working memory (n elements) between calls.

    Collective. Raises TypeError for other dtypes and ValueError for ``ends`` that do not divide the
    buffer, both before anything is sent.
    """
    flat(buffer)
    name = dtype_name(buffer, dtype)
    if name not in FLOATS:
        raise TypeError(f"Adasum combines {', '.join(FLOATS)}, not {name}")
    bounds = np.array(ends, np.int64)
    if bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0 or bounds[-1] != buffer.size:
        raise ValueError(f"ends must go from 0 to {buffer.size}, the buffer's size, not {ends}")
    if (np.diff(bounds) < 0).any():
        raise ValueError(f"ends must ascend: {ends}")
    _Tree(comm, buffer, bounds, name, scratch or Scratch()).reduce()


class _Tree:
    """One call: the buffer, what was received for it, and this rank's place in the tree.

    Ranks outside the tree (``rank >= power``) take part in its exchanges with nothing to say.
    """

    def __init__(
        self, comm: Communicator, buffer: Array, bounds: Array, name: str, scratch: Scratch
    ) -> None:
        self.comm, self.buffer, self.bounds, self.name = comm, buffer, bounds, name
        self.received = scratch.take(buffer.size, buffer.dtype)
        self.levels = comm.size.bit_length() - 1
        self.power = 1 << self.levels

    def reduce(self) -> None:
        """Fold the ranks outside in, climb the tree, come down again, and serve those outside."""
        whole, nothing = slice(0, self.buffer.size), slice(0, 0)
        rank, extra = self.comm.rank, self.comm.size - self.power
        outside, folded = rank >= self.power, rank < extra
        twin = rank - self.power if outside else rank + self.power if folded else rank
        if extra:
            self._trade(twin, whole if outside else nothing, whole if folded else nothing)
            if folded:
                self._combine(whole, upper=False, levels=0)
        held: list[tuple[slice, slice]] = []  # at each level: what stayed here, what was given away
        mine = nothing if outside else whole
        for level in range(self.levels):
            upper = bool(rank >> level & 1)
            mine, given = _halves(mine, upper)
            held.append((mine, given))
            self._trade(self._partner(level), given, mine)
            self._combine(mine, upper, level + 1)
        for level, (mine, given) in reversed(list(enumerate(held))):
            self._trade(self._partner(level), mine, given)
            self.buffer[given] = self.received[given]
        if extra:
            self._trade(twin, whole if folded else nothing, whole if outside else nothing)
            if outside:
                self.buffer[:] = self.received

    def _partner(self, level: int) -> int:
        rank = self.comm.rank
        return rank if rank >= self.power else rank ^ (1 << level)

    def _trade(self, partner: int, send: slice, receive: slice) -> None:
        _exchange(self.comm, self.buffer[send], self.received[receive], partner)

    def _combine(self, piece: slice, upper: bool, levels: int) -> None:
        """Combine this rank's ``piece`` with what was received for it.

        2**levels ranks have a piece of this pair each: the ``upper`` half of them came with b, the
        others with a.
        """
        own = self.buffer[piece]
        bounds = np.clip(self.bounds, piece.start, piece.stop) - piece.start
        a, b = (self.received[piece], own) if upper else (own, self.received[piece])
        half = kernels(self.name) if self.name in HALVES else None
        if half:
            wide = np.empty((2, own.size), np.float32)
            half.widen(a.view(np.uint16), wide[0])
            half.widen(b.view(np.uint16), wide[1])
            a, b = wide
        products = np.zeros((bounds.size - 1, 3))  # of every tensor: a.b, a.a, b.b
        _kernels().measure(a, b, bounds, products)
        self._sum(products.reshape(-1), levels)
        scale_a = _coefficients(products[:, 0], products[:, 1])
        scale_b = _coefficients(products[:, 0], products[:, 2])
        out = a if half else own
        _kernels().blend(a, b, bounds, scale_a, scale_b, out)
        if half:
            half.narrow(out, own.view(np.uint16))

    def _sum(self, values: Array, levels: int) -> None:
        """Sum ``values`` over groups of 2**levels ranks: recursive doubling, so equal bits."""
        theirs = np.zeros_like(values)
        for level in range(levels):
            partner = self._partner(level)
            used = slice(0, 0 if partner == self.comm.rank else values.size)
            _exchange(self.comm, values[used], theirs[used], partner)
            values += theirs


def _exchange(comm: Communicator, send: Array, receive: Array, partner: int) -> None:
    """Send to ``partner`` and receive from it; all ranks call, those without one name themselves.

    Pieces for nobody are empty.
    """
    sends, receives = [0] * comm.size, [0] * comm.size
    sends[partner], receives[partner] = send.size, receive.size
    comm.alltoall(send, receive, sends, receives)


def _halves(whole: slice, upper: bool) -> tuple[slice, slice]:
    """Return the half that stays on this rank, and the other one."""
    middle = whole.start + (whole.stop - whole.start) // 2
    low, high = slice(whole.start, middle), slice(middle, whole.stop)
    return (high, low) if upper else (low, high)


def _coefficients(product: Array, norm: Array) -> Array:
    """Return 1 - a.b / 2|a|^2 for every tensor; 1 where the vector is as good as zero."""
    tiny = norm < TINY
    with np.errstate(all="ignore"):
        factors: Array = np.where(tiny, 1.0, 1.0 - product / (2.0 * np.where(tiny, 1.0, norm)))
    return factors


class _Kernels(NamedTuple):
    measure: Callable[[Array, Array, Array, Array], None]
    blend: Callable[[Array, Array, Array, Array, Array, Array], None]


def _measure(a: Any, b: Any, bounds: Any, products: Any) -> None:
    for i in range(bounds.size - 1):
        ab = aa = bb = 0.0
        for j in range(bounds[i], bounds[i + 1]):
            x, y = np.float64(a[j]), np.float64(b[j])
            ab += x * y
            aa += x * x
            bb += y * y
        products[i, 0], products[i, 1], products[i, 2] = ab, aa, bb


def _blend(a: Any, b: Any, bounds: Any, scale_a: Any, scale_b: Any, out: Any) -> None:
    for i in range(bounds.size - 1):
        s, t = scale_a[i], scale_b[i]
        for j in range(bounds[i], bounds[i + 1]):
            out[j] = s * a[j] + t * b[j]


@functools.cache
def _kernels() -> _Kernels:
    from ringlet.ring.jit import jit

    # Every product is computed on one rank only, so the order of its terms is free.
    return _Kernels(jit(_measure, fastmath={"reassoc", "contract"}), jit(_blend))
