"""What can be asked for: operations, and the dtypes and shapes that they are defined for.

A rank that asks for anything else is refused before others hear of it.
"""

from __future__ import annotations

from ringlet.fusion.requests.request import KINDS, Request
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import FLOATS, Array, storage

REDUCTIONS = ("allreduce", "reducescatter")
IN_PLACE = ("allreduce", "broadcast")  # whose result has the size of the input


def check_request(request: Request, size: int) -> None:
    """Raise TypeError or ValueError, which say what works, unless ``size`` ranks can do it."""
    kind = request.kind
    if kind not in KINDS:
        raise ValueError(f"operation {kind!r} of {request.name!r} is none of {', '.join(KINDS)}")
    storage(request.dtype)
    try:
        request.name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the tensor's name {request.name!r} is no Unicode: {error}") from error
    if any(n < 0 for n in request.shape):
        raise _refusal(ValueError, request, f"shape {list(request.shape)} has a negative size")
    if not isinstance(request.op, ReduceOp):
        raise _refusal(TypeError, request, f"op is a ReduceOp, not {request.op!r}")
    if kind in REDUCTIONS:
        _check_reduction(request)
    elif kind == "broadcast" and not 0 <= request.root < size:
        raise _refusal(ValueError, request, f"the root is below {size}, not {request.root}")
    elif kind == "alltoall":
        _check_splits(request, size)


def usable(request: Request, values: Array, in_place: bool) -> bool:
    """Whether ``check_values`` has nothing to say."""
    if (values.shape, values.dtype) != request.fit:
        return False
    return request.place != "host" or lies_well(values, in_place)


def lies_well(values: Array, in_place: bool) -> bool:
    """Whether an array in host memory is contiguous, and can be written to if that is needed."""
    flags = values.flags
    return flags.c_contiguous and (flags.writeable or not in_place)


def check_values(request: Request, values: Array, in_place: bool) -> None:
    """Raise TypeError or ValueError unless ``values`` are those of ``request``: ``request.fit``.

    They are contiguous, and can be written to where the result lies ``in_place``. Those of a
    barrier do not matter.
    """
    if request.kind == "barrier":
        return
    expected = f"a flat array of {request.numel} elements of {storage(request.dtype)}"
    if values.dtype != storage(request.dtype):
        raise _refusal(TypeError, request, f"{expected} is needed, not one of {values.dtype}")
    if values.shape != (request.numel,):
        raise _refusal(ValueError, request, f"{expected} is needed, not of shape {values.shape}")
    if request.place != "host":
        return
    if not values.flags.c_contiguous:
        raise _refusal(ValueError, request, f"{expected} is needed, which is contiguous")
    if in_place and not values.flags.writeable and request.kind in IN_PLACE:
        what = "the result replaces the values, which are read-only: give an output, or a copy"
        raise _refusal(ValueError, request, what)


def _check_reduction(request: Request) -> None:
    op, dtype = request.op, request.dtype
    if request.kind == "reducescatter":
        if op is ReduceOp.ADASUM:
            raise _refusal(ValueError, request, "op is Average, Sum, Min, Max or Product")
        if not request.shape:
            raise _refusal(ValueError, request, "a tensor without dimensions has no rows")
    if op is ReduceOp.ADASUM and dtype not in FLOATS:
        known = ", ".join(FLOATS)
        raise _refusal(TypeError, request, f"Adasum takes {known}, not {dtype!r}; try Sum")
    if dtype != "bool":
        return
    if op is ReduceOp.AVERAGE:
        what = "booleans have no average: op=Sum is any, op=Min is all, or reduce float32"
        raise _refusal(TypeError, request, what)
    if request.prescale != 1.0 or request.postscale != 1.0:
        raise _refusal(TypeError, request, "booleans cannot be scaled; reduce float32")


def _check_splits(request: Request, size: int) -> None:
    rows = request.shape[0] if request.shape else 0
    splits = request.splits
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        what = f"splits {list(splits)} do not divide {rows} rows over {size} ranks"
        raise _refusal(ValueError, request, what)


def _refusal(kind: type[Exception], request: Request, what: str) -> Exception:
    return kind(f"{request.kind} of tensor {request.name!r} of dtype {request.dtype!r}: {what}")
