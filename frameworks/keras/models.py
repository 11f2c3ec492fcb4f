"""Loading a model that goes on training on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.keras.dtype_policy import fits
from ringlet.keras.optimizer import DistributedOptimizer
from ringlet.precision import Policy, parse_policy


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Spec | Routes | Any = None,
    legacy_opts: bool = False,
    precision: str | Policy | None = None,
) -> Any:
    """Return the model saved at ``filepath``, its optimizer and that one's state distributed.

    ``custom_optimizers`` and ``custom_objects`` tell Keras of classes that are not its own. A model
    that was saved without an optimizer is returned as it is. ``legacy_opts`` is refused: Keras 3
    has no such optimizers. ``precision`` is that of the layers as they were saved, for the
    optimizer, which keeps a LossScaleOptimizer that was saved; see ``DistributedOptimizer``.
    Raises ValueError for a policy in whose dtype no layer computes.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers; leave legacy_opts away")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    fits(parse_policy(precision), model)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(
            model.optimizer, compression=compression, precision=precision
        )
    return model
