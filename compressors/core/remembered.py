"""What compressors remember between steps, taken from ``ctx.state`` only where it fits.

A state may come from another tensor of the name, from another spec or out of a checkpoint: kernels
that took its length on trust would write beyond its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError

_FLOAT32 = np.dtype("float32")  # compared in every call: a type would be made a dtype each time


def remembered(name: str, n: int, ctx: Context) -> Array:
    """Return the piece of ``n`` elements, from ``ctx.offset`` on, of the flat array ``name``.

    The array (float32) is of ``ctx.numel`` elements, zeros at first. Raises CompressorError where
    something else is remembered: values of another tensor stand for nothing in this one.
    """
    whole, numel = ctx.state.get(name), max(ctx.numel, n)
    if whole is None:
        whole = ctx.state[name] = ctx.xp.zeros(numel, "float32")
    elif not is_array(whole, (numel,), ctx):
        raise CompressorError(
            f"what is remembered as {name!r} of {ctx.name!r} is {described(whole)}, not "
            f"float32[{numel}] as the tensor is; a tensor of another size needs another name"
        )
    piece: Array = whole[ctx.offset : ctx.offset + n]
    if piece.size != n:
        raise CompressorError(
            f"elements {ctx.offset} to {ctx.offset + n} of {ctx.name!r} lie beyond its {numel}; "
            "give the context the tensor's numel"
        )
    return piece


def remembered_rows(
    name: str, room: Array, draw: Callable[[Array, Context], None], ctx: Context
) -> Array:
    """Return the matrix ``name`` (float32, r x n as ``room`` is), by which the next step begins.

    Itself where it fits; else ``room``, drawn anew by ``draw`` but for the rows that are
    remembered: a rank that changes keeps what is known, columns of another number tell nothing.
    """
    known = ctx.state.get(name)
    if known is not None and is_array(known, room.shape, ctx):
        matrix: Array = known
        return matrix
    draw(room, ctx)
    if known is not None and is_array(known, (None, room.shape[1]), ctx):
        fitting = min(len(room), len(known))
        room[:fitting] = known[:fitting]
    return room


def remember_rows(name: str, rows: Array, ctx: Context) -> Array:
    """Return the matrix ``name`` of the state, which is ``rows`` from now on: they, or a copy."""
    if ctx.state.get(name) is not rows:
        ctx.state[name] = rows.copy()
    matrix: Array = ctx.state[name]
    return matrix


def is_array(value: Any, shape: tuple[int | None, ...], ctx: Context) -> bool:
    """Whether ``value`` is a contiguous float32 array of ``shape``, where ``ctx.xp`` computes.

    None stands for any length.
    """
    if not isinstance(value, ctx.xp.ndarray) or value.dtype != _FLOAT32:
        return False
    given = value.shape
    if given != shape and (
        len(given) != len(shape)
        or not all(n is None or n == held for n, held in zip(shape, given, strict=True))
    ):
        return False
    return bool(value.flags.c_contiguous)


def described(value: Any) -> str:
    """Return the dtype and shape of an array, or the type of what is none."""
    if not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}{list(value.shape)}"
