"""What a rank that has joined contributes: values that leave the others' result as it is."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ringlet.fusion.requests.request import Request
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array

_BFLOAT16 = {ReduceOp.MIN: 0x7F80, ReduceOp.MAX: 0xFF80, ReduceOp.PRODUCT: 0x3F80}  # inf, -inf, 1
COMPARING = frozenset(_BFLOAT16)  # for which other values than zeros stand in


def neutral(request: Request, numel: int, xp: ModuleType = np) -> Array:
    """Return ``numel`` flat values for ``request``: zeros for sums, else what is neutral to the op.

    They are an array of the module ``xp``.
    """
    dtype, op = request.storage, request.op
    if op not in _BFLOAT16 or request.kind != "allreduce":
        zeros: Array = xp.zeros(numel, dtype)
        return zeros
    if request.dtype == "bfloat16":
        value: float = _BFLOAT16[op]
    elif op is ReduceOp.PRODUCT:
        value = 1
    elif dtype.kind == "f":
        value = np.inf if op is ReduceOp.MIN else -np.inf
    elif dtype.kind == "b":
        value = op is ReduceOp.MIN
    else:
        limits = np.iinfo(dtype)
        value = limits.max if op is ReduceOp.MIN else limits.min
    full: Array = xp.full(numel, value, dtype)
    return full
