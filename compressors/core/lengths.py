"""Lengths of arrays, asserted before kernels: they check none, and would write beyond an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.errors import CompressorError, PayloadError
from ringlet.compressors.core.traits import Part, Payload, storage

MOST_COUNTED = 2**31 - 1  # elements of a tensor that is selected from


def check_lengths(what: str, n: int, **arrays: Array | None) -> None:
    """Raise CompressorError unless each of ``arrays`` holds ``n`` elements. None stands for none.

    ``what`` is what would work on them.
    """
    for name, array in arrays.items():
        if array is not None and array.size != n:
            raise CompressorError(f"{what}: {name!r} holds {array.size} elements, not {n}")


def check_countable(what: str, n: int) -> None:
    """Raise CompressorError for a tensor whose entries kernels cannot count in 31 bits."""
    if n > MOST_COUNTED:
        raise CompressorError(
            f"{what} counts and numbers entries in 31 bits, which {n} elements exceed; use "
            "'block_topk', which counts inside blocks, a quantiser, or split the tensor"
        )


def check_shapes(what: str, **arrays: tuple[Array, tuple[int, ...]]) -> None:
    """Raise CompressorError unless each array has the shape given with it."""
    for name, (array, shape) in arrays.items():
        if array.shape != shape:
            raise CompressorError(
                f"{what}: {name!r} is of shape {list(array.shape)}, not {list(shape)}"
            )


def check_parts(label: Callable[[], str], layout: Sequence[Part], payload: Payload) -> None:
    """Raise PayloadError, with a ``label``, unless ``payload`` has the arrays of ``layout``."""
    for name, dtype, elements in layout:
        array = payload.get(name)
        if array is None or array.size != elements or array.dtype != storage(dtype):
            found = "is missing" if array is None else f"is {array.dtype}[{array.size}]"
            raise PayloadError(
                f"{label()}: the payload's {name!r} {found}, its layout says {dtype}[{elements}]"
            )


def check_entries(label: str, payload: Payload) -> tuple[Array, Array]:
    """Return ``indices`` (uint32) and ``values`` (float32), one for each; PayloadError if not."""
    indices, values = payload.get("indices"), payload.get("values")
    if indices is None or values is None:
        raise PayloadError(f"{label}: a payload of {sorted(payload)} lacks indices, or values")
    if indices.dtype != "uint32" or values.dtype != "float32" or indices.size != values.size:
        raise PayloadError(
            f"{label}: indices are {indices.dtype}[{indices.size}], values {values.dtype}"
            f"[{values.size}]; they must be as many, uint32 and float32"
        )
    return indices, values
