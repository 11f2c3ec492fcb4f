"""What every collective demands of its arguments; transports may rely on it."""

from __future__ import annotations

from collections.abc import Sequence

from ringlet.ring.dtypes import Array


def flat(*arrays: Array) -> None:
    """Refuse arrays that a transport cannot take as they are."""
    for array in arrays:
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError(f"buffers are flat and contiguous; this one is {array.shape}")


def alike(send: Array, receive: Array) -> None:
    """Refuse arrays that are not flat, or not of one dtype."""
    flat(send, receive)
    if send.dtype != receive.dtype:
        raise TypeError(f"send has dtype {send.dtype}, but receive has {receive.dtype}")


def divided(counts: Sequence[int] | None, size: int, total: int) -> list[int]:
    """Return ``counts`` (None: equal ones), which must divide ``total`` elements over all ranks."""
    shares = [total // size] * size if counts is None else [int(n) for n in counts]
    if len(shares) != size or sum(shares) != total or min(shares) < 0:
        raise ValueError(f"counts {shares} do not divide {total} elements over {size} ranks")
    return shares


def same(count: int, array: Array, which: str) -> None:
    """Refuse a ``which`` array that has not the ``count`` elements that the counts give it."""
    if count != array.size:
        raise ValueError(f"counts give this rank {count} elements, {which} has {array.size}")
