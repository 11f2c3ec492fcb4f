"""Gradients of collectives: they are collectives too, so ranks have to run backward together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

Forward = Callable[[list[Any]], tuple[list[Any], Any]]  # outputs, and what backward needs
STOP = "tf.stop_gradient"  # what keeps gradients from an input
Backward = Callable[[list[Any], Any], Sequence[Any]]


def differentiable(tensors: Sequence[Any], forward: Forward, backward: Backward) -> list[Any]:
    """Return the outputs of ``forward(tensors)``, with ``backward(gradients, saved)`` behind it.

    Integers have no gradient: where any output is one, ``backward`` gets zeros for it.
    """

    if tf.executing_eagerly() and not could_possibly_record():
        return list(forward(list(tensors))[0])  # no tape would ask for gradients

    @tf.custom_gradient
    def operation(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        outputs, saved = forward(list(given))

        def gradient(*upstream: Any) -> list[Any]:
            filled = [
                tf.zeros_like(output) if grad is None else tf.convert_to_tensor(grad)
                for grad, output in zip(upstream, outputs, strict=True)
            ]
            results = backward(filled, saved)
            return [
                grad if tensor.dtype.is_floating else None
                for grad, tensor in zip(results, given, strict=True)
            ]

        return outputs, gradient

    return list(operation(*tensors))
