"""Batch normalisation over the batches of all ranks, as a layer of tf_keras, which is Keras 2."""

from __future__ import annotations

from typing import Any

import tf_keras

from ringlet.tensorflow.batch_moments import is_alone, moments_of_all


@tf_keras.utils.register_keras_serializable(package="ringlet", name="SyncBatchNormalization")
class SyncBatchNormalizationOfTfKeras(tf_keras.layers.BatchNormalization):
    """Normalise with the mean and variance of all ranks' batches together.

    Arguments and state are those of ``tf_keras.layers.BatchNormalization``; outside training, and
    on one rank, it is that. Ranks may hold batches of different sizes. ``fused`` must be False.
    """

    def __init__(self, *args: Any, fused: bool = False, **kwargs: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(*args, fused=False, **kwargs)

    def _calculate_mean_and_var(
        self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None
    ) -> tuple[Any, Any]:
        if is_alone():
            result: tuple[Any, Any] = super()._calculate_mean_and_var(
                inputs, reduction_axes, keep_dims, mask=mask
            )
            return result
        return moments_of_all(inputs, reduction_axes, mask, keep_dims)
