"""TensorFlow's tensors as NumPy arrays and back, and which of them can travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import ALIGNMENT, DTYPES, numpy_dtype

LEAVES = "tf.nest.flatten(tree)"  # what makes a list of tensors of a tree

_SIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
_SHARED = 1 << 16  # bytes from which an array becomes a tensor without a copy


def dense(tensor: Any, what: str = "tensor", moves: bool = False) -> Any:
    """Return ``tensor`` (a variable, an array, a number) as a dense tensor that can travel.

    Raises TypeError for what cannot: ragged, sparse and symbolic Keras tensors, strings. One that
    only ``moves``, and is not computed with, may be of more types.
    """
    if isinstance(tensor, tf.RaggedTensor):
        raise TypeError(
            f"{what} is a RaggedTensor: its rows differ in length, so ranks cannot combine it; "
            "pass .to_tensor(), or gather .values and .row_splits"
        )
    if isinstance(tensor, tf.SparseTensor):
        raise TypeError(f"{what} is a SparseTensor; pass tf.sparse.to_dense(...) of it")
    if isinstance(tensor, tf.IndexedSlices):
        raise TypeError(
            f"{what} is IndexedSlices, which only allreduce and grouped_allreduce take; pass "
            "tf.convert_to_tensor(...) of it"
        )
    if type(tensor).__name__ == "KerasTensor":
        raise TypeError(
            f"{what} is a symbolic KerasTensor, which has no values while a functional model is "
            "built; call this inside a layer's call(), or a training step"
        )
    given = tf.convert_to_tensor(tensor)
    if not (moves and given.dtype.name in _SIGNED):
        dtype_of(given, what)
    if tf.executing_eagerly() and not hasattr(given, "numpy"):
        raise TypeError(
            f"{what} is {given.name!r} of a tf.function or graph that has been left, so it has no "
            "value here; return it from the function, or call this inside"
        )
    return given


def dtype_of(tensor: Any, what: str = "tensor") -> str:
    """Return the name of the tensor's dtype; TypeError for one that cannot travel."""
    name: str = tensor.dtype.name
    if name not in DTYPES:
        raise TypeError(f"{what} is of dtype {name}, which cannot travel; use {', '.join(DTYPES)}")
    return name


def divided(gradient: Any, by: Any) -> Any:
    """Return a gradient, a tensor or IndexedSlices, divided by a number of any dtype."""
    if isinstance(gradient, tf.IndexedSlices):
        values = divided(gradient.values, by)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(by, gradient.dtype)


def signed(tensor: Any) -> Any:
    """Return a tensor of unsigned numbers, which cannot travel, as signed ones of the same bits."""
    as_type = _SIGNED.get(tensor.dtype.name)
    return tensor if as_type is None else tf.bitcast(tensor, as_type)


def unsigned(tensor: Any, like: Any) -> Any:
    """Return what became of ``signed(like)`` in the type of ``like``."""
    return tensor if tensor.dtype == like.dtype else tf.bitcast(tensor, like.dtype)


def to_array(tensor: Any) -> Array:
    """Return an eager tensor's memory as an array, to be read only."""
    return np.asarray(tensor.numpy() if tensor.shape.rank == 0 else tensor)


def to_tensor(array: Array, dtype: str) -> Any:
    """Return an array that nobody else uses as an eager tensor; large ones share memory."""
    large = array.nbytes >= _SHARED and dtype not in ("bfloat16", "bool")
    if large and array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous:
        # TensorFlow takes over whatever it is given, and aborts later if that is not aligned.
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array, dtype=tf.as_dtype(numpy_dtype(dtype)))
