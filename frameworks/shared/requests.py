"""Horovod's operations as requests: names, groups, argument checks, and dtypes on the wire."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np

from ringlet.compressors import BF16, FP16, Compressor, NoCompression
from ringlet.compressors.base.nesting import overrides
from ringlet.fusion import Request
from ringlet.fusion.devices.host import Place
from ringlet.job.process_sets import InvalidArgument, ProcessSet
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import FLOATS

SUMS = (ReduceOp.AVERAGE, ReduceOp.SUM)
Factors = tuple[float, float]  # what values are multiplied by before and after they are combined


def reduce_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """Return the op that Horovod's two ways of naming it mean.

    Raises ValueError if both are used, or ``average`` is neither True nor False.
    """
    if average is None:
        if op is None:
            return ReduceOp.AVERAGE
        return op if type(op) is ReduceOp else as_op(op)
    if op is not None:
        raise ValueError("pass op or average (which is deprecated), not both")
    if not isinstance(average, bool | np.bool_):
        raise ValueError(_no_average(average))
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _no_average(given: object) -> str:
    """Return what to write where ``given`` stands in the place of ``average``."""
    meant = ""
    if isinstance(given, ReduceOp):
        meant = f": write op=hvd.{given.name.title()}"
    elif isinstance(given, str):
        meant = f": write name={given!r}"
    return f"average (which is deprecated) is True or False, not {given!r}{meant}"


def as_op(op: Any) -> ReduceOp:
    """Return an op, which may be one of Horovod's numbers. Raises ValueError for what is none."""
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        raise ValueError(f"op={op!r} is a text: write op=hvd.{op.title()}")
    if not isinstance(op, bool) and isinstance(op, Integral):  # True is none of Horovod's numbers
        with suppress(ValueError):
            return ReduceOp(int(op))
    # torch's are numbers of another order, and compare as such.
    near = difflib.get_close_matches(str(getattr(op, "name", "")), ReduceOp.__members__, 1, 0.5)
    meant = f": write op=hvd.{near[0].title()}" if near else ""
    known = ", ".join(f"hvd.{each.title()}" for each in ReduceOp.__members__)
    raise ValueError(f"op is one of {known}, not {op!r}{meant}")


def member_names(base: str, count: int, single: bool) -> list[str]:
    """Return the names of ``count`` tensors that travel under ``base``: itself for a single one."""
    return [base] if single else [f"{base}_{i}of{count}" for i in range(1, count + 1)]


def group_requests(
    kind: str,
    base: str,
    single: bool,
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    places: Sequence[str] | None = None,
    **alike: Any,
) -> list[Request]:
    """Return requests for tensors that are executed together or not at all, or for a single one.

    ``places`` are by default host memory; ``alike`` is what else all requests say.
    """
    count = len(dtypes)
    if not single:
        alike |= {"group": base, "group_size": count}
    names = member_names(base, count, single)
    each = zip(names, dtypes, shapes, places or [Place.name] * count, strict=True)
    return [
        Request(name, kind, dtype, tuple(shape), place=place, **alike)
        for name, dtype, shape, place in each
    ]


def refuse_one(
    tensors: object,
    operation: str,
    leaves: str = "list(tensors.values())",
    things: str = "tensors",
) -> None:
    """Raise TypeError for a mapping, or a single tensor, in the place of a group of ``things``.

    ``leaves`` is what makes a list of a tree in the framework's words.
    """
    if isinstance(tensors, list | tuple):
        return
    if isinstance(tensors, Mapping) or hasattr(tensors, "shape"):
        found = "a mapping" if isinstance(tensors, Mapping) else f"one of the {things}"
        raise TypeError(
            f"a grouped {operation} takes a list of {things}, not {found}: pass {leaves}, or call "
            f"{operation} for one of them"
        )


def check_some(tensors: Sequence[Any], operation: str, *words: str) -> None:
    """Raise InvalidArgument for a group of no tensors, and as ``refuse_one`` does."""
    refuse_one(tensors, operation, *words)
    if not tensors:
        raise InvalidArgument(f"a grouped {operation} needs at least one tensor")


def check_nameable(compressor: Compressor) -> None:
    """Raise ValueError for a compressor that cannot serve a tensor without a name."""
    if overrides(compressor, "at"):
        raise ValueError(
            f"compression={str(compressor)!r} follows a schedule, by how often each tensor was "
            "reduced, so the tensor needs a name: pass name=..."
        )
    if compressor.traits().stateful:
        raise ValueError(
            f"compression={str(compressor)!r} remembers what it did to each tensor, so the tensor "
            "needs a name: pass name=..."
        )


def check_predivide(factor: float, op: ReduceOp) -> None:
    """Raise ValueError unless ``factor`` is a possible gradient_predivide_factor."""
    if factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"gradient_predivide_factor must be above 0, got {factor}")


def reduced_as(dtype: str, op: ReduceOp, compressor: Compressor) -> str:
    """Return the dtype that is handed in: for minima and the like, a 16-bit cast happens before.

    Raises InvalidArgument for compressors that are no cast.
    """
    if op in SUMS or dtype not in FLOATS or isinstance(compressor, NoCompression):
        return dtype
    if isinstance(compressor, FP16 | BF16):
        return _cast_to(compressor)
    raise InvalidArgument(
        f"op={op.name.title()} needs compression 'none', 'fp16' or 'bf16', not {str(compressor)!r}"
    )


def scattered_as(compressor: Compressor) -> str | None:
    """Return the dtype in which floating-point tensors are reduce-scattered; None for their own.

    Raises InvalidArgument for compressors that are no cast.
    """
    if isinstance(compressor, NoCompression):
        return None
    if isinstance(compressor, FP16 | BF16):
        return _cast_to(compressor)
    raise InvalidArgument(
        f"reducescatter takes compression 'none', 'fp16' or 'bf16', not {str(compressor)!r}: "
        "others are decoded on every rank, so use allreduce"
    )


def scattered_types(dtypes: Sequence[str], wire: str | None) -> list[str]:
    """Return the dtypes in which tensors are reduce-scattered whose floats travel as ``wire``."""
    return [wire if wire and dtype in FLOATS else dtype for dtype in dtypes]


def _cast_to(compressor: FP16 | BF16) -> str:
    return "float16" if isinstance(compressor, FP16) else "bfloat16"


def check_scatter(op: ReduceOp, dimensions: Iterable[int | None]) -> None:
    """Raise InvalidArgument for what cannot be reduce-scattered; None stands for unknown."""
    if op is ReduceOp.ADASUM:
        raise InvalidArgument("reducescatter takes op Average, Sum, Min, Max or Product")
    if any(each == 0 for each in dimensions):
        raise InvalidArgument("reducescatter needs a tensor with at least one dimension")


def scatter_gradient(op: ReduceOp, factors: Factors, process_set: ProcessSet) -> float | None:
    """Return what a reduce-scatter's gradient is multiplied by; None where it has no gradient."""
    if op not in SUMS:
        return None
    return factors[0] * factors[1] * (process_set.size() if op is ReduceOp.SUM else 1)


def check_splits(dtype: object, shape: object, fits: bool) -> None:
    """Raise InvalidArgument unless an all-to-all's splits ``fits``: are a row of whole numbers."""
    if not fits:
        raise InvalidArgument(f"splits must be whole numbers in one dimension, not {dtype}{shape}")


def rows_to_send(splits: Iterable[int] | None, shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Return how many rows an all-to-all sends to each rank; InvalidArgument if that cannot be."""
    if not shape:
        raise InvalidArgument("alltoall needs a tensor with at least one dimension")
    if splits is None:
        if shape[0] % size:
            raise InvalidArgument(
                f"alltoall without splits needs a first dimension that {size} ranks divide, not "
                f"{shape[0]}; pass splits"
            )
        return (shape[0] // size,) * size
    rows = tuple(int(n) for n in splits)
    if len(rows) != size or sum(rows) != shape[0] or min(rows) < 0:
        raise InvalidArgument(
            f"splits {list(rows)} must give each of {size} ranks a share of {shape[0]} rows"
        )
    return rows
