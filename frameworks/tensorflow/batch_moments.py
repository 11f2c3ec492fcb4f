"""Mean and variance of the batches of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.tensorflow.ops.reductions import allreduce
from ringlet.tensorflow.ops.topology_ops import ranks_stay


def is_alone() -> bool:
    """Whether this rank's batch is all there is, also whenever what is traced now runs."""
    return current().size == 1 and ranks_stay()


def moments_of_all(
    inputs: Any, axes: Sequence[int], mask: Any = None, keep_dims: bool = False
) -> tuple[Any, Any]:
    """Return the mean and the variance over ``axes`` of what all ranks hold.

    ``mask`` lacks the last dimension of ``inputs``; what it leaves out counts for nothing.
    """
    if mask is None:
        weights = tf.ones(tf.shape(inputs), inputs.dtype)
    else:
        expanded = tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        weights = tf.broadcast_to(expanded, tf.shape(inputs))
    # Two passes: the variance about the common mean does not cancel.
    sums = [tf.reduce_sum(each, axes, keepdims=True) for each in (inputs * weights, weights)]
    totals = _summed(tf.stack(sums))
    counts = tf.maximum(totals[1], 1.0)
    mean = totals[0] / counts
    spread = weights * tf.square(inputs - mean)
    variance = _summed(tf.reduce_sum(spread, axes, keepdims=True)) / counts
    if keep_dims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _summed(tensor: Any) -> Any:
    return allreduce(tensor, op=ReduceOp.SUM)
