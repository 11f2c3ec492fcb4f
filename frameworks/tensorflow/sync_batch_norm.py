"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.tensorflow.ops.reductions import allreduce


@keras.saving.register_keras_serializable(package="ringlet")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalise with the mean and variance of all ranks' batches together.

    Arguments and state are those of ``keras.layers.BatchNormalization``; outside training, and on
    one rank, it is that. Ranks may hold batches of different sizes. ``fused`` is accepted for
    Horovod's sake, and must be False.
    """

    def __init__(self, *args: Any, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(*args, **kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if current().size == 1:
            result: tuple[Any, Any] = super()._moments(inputs, mask)
            return result
        axes, wide = self._reduction_axes, inputs  # Keras has widened 16-bit inputs
        if mask is None:
            weights = tf.ones(tf.shape(wide), wide.dtype)
        else:
            expanded = tf.cast(mask, wide.dtype)[..., tf.newaxis]
            weights = tf.broadcast_to(expanded, tf.shape(wide))
        # Two passes: the variance about the common mean does not cancel.
        sums = tf.reduce_sum(wide * weights, axes), tf.reduce_sum(weights, axes)
        totals = _summed(tf.stack(sums))
        counts = tf.maximum(totals[1], 1.0)
        mean = totals[0] / counts
        shape = [1] * len(wide.shape)
        shape[self.axis] = wide.shape[self.axis]
        spread = weights * tf.square(wide - tf.reshape(mean, shape))
        variance = _summed(tf.reduce_sum(spread, axes)) / counts
        return mean, variance


def _summed(tensor: Any) -> Any:
    return allreduce(tensor, op=ReduceOp.SUM)
