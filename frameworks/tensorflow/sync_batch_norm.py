"""Batch normalisation over the batches of all ranks, as a layer of what ``tf.keras`` is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from ringlet.keras import tf_keras
from ringlet.tensorflow.batch_moments import is_alone, moments_of_all

__all__ = ["SyncBatchNormalization"]


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
        if is_alone():
            result: tuple[Any, Any] = super()._moments(inputs, mask)
            return result
        return moments_of_all(inputs, self._reduction_axes, mask)  # Keras has widened 16-bit inputs


if not TYPE_CHECKING and tf_keras.is_tf_keras():  # whose models take no layers of Keras 3
    from ringlet.tensorflow.tf_keras_batch_norm import (
        SyncBatchNormalizationOfTfKeras as SyncBatchNormalization,
    )
