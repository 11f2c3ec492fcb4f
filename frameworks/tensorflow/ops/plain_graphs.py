"""Calls out of a ``tf.compat.v1`` graph that leave TensorFlow's threads to other nodes.

Such a graph runs its nodes in any order, a different one on every rank. Were each to keep a thread
until its peers answer, a few of them would block all others, on every rank different ones. So the
call is a data set of one element: an iterator's node waits without a thread, and the call has one
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringlet.ring.dtypes import Array


def call(function: Callable[..., list[Array]], tensors: Sequence[Any], kinds: Sequence[Any]) -> Any:
    """Return ``function(*tensors)`` as a list of tensors of the dtypes ``kinds``, at least one."""

    def inside(*given: Any) -> tuple[Any, ...]:
        made = tf.numpy_function(function, given if tensors else [], list(kinds))
        return tuple(made) if isinstance(made, list | tuple) else (made,)

    data = tf.data.Dataset.from_tensors(tuple(tensors) or 0).map(inside)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    variant = data.with_options(options)._variant_tensor
    kind = {"output_types": list(kinds), "output_shapes": [tf.TensorShape(None)] * len(kinds)}
    iterator = tf.raw_ops.AnonymousIteratorV3(**kind)
    made = tf.raw_ops.MakeIterator(dataset=variant, iterator=iterator)
    with tf.control_dependencies([made]):
        return tf.raw_ops.IteratorGetNext(iterator=iterator, **kind)
