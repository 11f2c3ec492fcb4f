"""NDArrays in host memory as NumPy arrays that share it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ringlet.job.process_sets import InvalidArgument
from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import DTYPES

_HOST = (1, 0)  # DLPack's number for host memory


class _Exported:
    """A capsule of DLPack's in the shape that NumPy asks for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


def check(tensor: Any, what: str = "tensor") -> None:
    """Raise TypeError for what is no dense NDArray in host memory, or of a dtype that cannot go."""
    if not isinstance(tensor, mx.nd.NDArray):
        kind = type(tensor).__name__
        raise TypeError(f"{what} must be an NDArray, not {kind}: call mx.nd.array(...) first")
    if tensor.stype != "default":
        raise TypeError(
            f"{what} is sparse ({tensor.stype}), which cannot travel: call .tostype('default'), or "
            "make the layer without sparse_grad"
        )
    if tensor.context.device_type == "gpu":
        raise TypeError(f"{what} lies on a GPU: call .as_in_context(mx.cpu())")
    name = np.dtype(tensor.dtype).name
    if name == "bool":  # for which MXNet 1.9 makes no capsule
        raise TypeError(f"{what} is of dtype bool, which cannot travel: call .astype('uint8')")
    if name not in DTYPES:
        raise TypeError(f"{what} is of dtype {name}, which cannot travel; use {', '.join(DTYPES)}")


def view(tensor: Any, what: str = "tensor") -> Array:
    """Return an NDArray's memory, to be read and written; waits for what MXNet does to it.

    Raises TypeError as ``check`` does.
    """
    check(tensor, what)
    tensor.wait_to_read()
    if tensor.size == 0:
        return np.empty(tensor.shape, tensor.dtype)
    exported = np.from_dlpack(_Exported(tensor.to_dlpack_for_write()))
    # NumPy takes capsules of this age for ones that are to be read only.
    memory: Any = (ctypes.c_char * exported.nbytes).from_address(exported.ctypes.data)
    memory.owner = exported
    writeable: Array = np.frombuffer(memory, exported.dtype).reshape(exported.shape)
    return writeable


def like(tensors: Sequence[Any]) -> list[Any]:
    """Return new NDArrays of the shapes and dtypes of others."""
    return [mx.nd.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def refuse_devices(param: Any, what: str) -> None:
    """Raise ValueError where Gluon's parameter is on several devices.

    Each would train by the gradients of its own part of a batch.
    """
    places = param.list_ctx()
    if len(places) > 1:
        raise ValueError(
            f"{what} is on {len(places)} devices ({', '.join(map(str, places))}), and a rank "
            "trains on one: initialize the network on one context, and start a rank for each device"
        )


def taken(array: Array) -> Any:
    """Return a new NDArray with an array's values."""
    if array.size == 0:
        raise InvalidArgument("MXNet 1.9 has no NDArrays without elements: this rank gets no rows")
    made = mx.nd.empty(array.shape, dtype=array.dtype)
    view(made)[...] = array
    return made
