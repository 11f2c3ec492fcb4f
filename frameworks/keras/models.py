"""Loading a model that goes on training on all ranks."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.session import current
from ringlet.keras import tf_keras
from ringlet.keras.checkpoint import saved_beside
from ringlet.keras.dtype_policy import fits
from ringlet.keras.optimizer import DistributedOptimizer
from ringlet.precision import Policy, parse_policy
from ringlet.ring.callers import public


@public
def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Spec | Routes | Any = None,
    legacy_opts: bool = False,
    precision: str | Policy | None = None,
) -> Any:
    """Return the model saved at ``filepath``, its optimizer and that one's state distributed.

    ``compression`` is that of the optimizer, as for ``DistributedOptimizer``: it is no part of the
    file. Rank 0 warns where it is not given and ``CompressorStateCheckpoint`` has left files beside
    the model, which ``load_compressor_state`` reads.

    ``custom_optimizers`` and ``custom_objects`` tell Keras of classes that are not its own. A model
    that was saved without an optimizer is returned as it is. A file of Keras 2 is loaded by
    tf_keras where the program uses that (it has imported it, or TF_USE_LEGACY_KERAS=1), and others
    by Keras 3. ``legacy_opts`` is refused for the latter, which has no such optimizers.
    ``precision`` is that of the layers as they were saved, for the optimizer, which keeps a
    LossScaleOptimizer that was saved; see ``DistributedOptimizer``. Raises ValueError for a policy
    in whose dtype no layer computes.
    """
    older = tf_keras.in_use()
    library = older if older is not None and _is_of_keras_2(Path(filepath)) else keras
    if legacy_opts and library is keras:
        raise ValueError("Keras 3 has no legacy optimizers; leave legacy_opts away")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = library.models.load_model(filepath, custom_objects=known)
    fits(parse_policy(precision), model)
    if getattr(model, "optimizer", None) is not None:
        if compression is None and precision is None:
            _warn_of_lost_compression(filepath)
        model.optimizer = DistributedOptimizer(
            model.optimizer, compression=compression, precision=precision
        )
    return model


def _warn_of_lost_compression(filepath: Any) -> None:
    """Warn where compressors have left their state beside a model that goes on without any."""
    if current().rank == 0 and (found := saved_beside(filepath)) is not None:
        path, specs = found
        warnings.warn(
            f"load_model was given no compression, so gradients travel uncompressed, but {path} "
            f"was saved with {', '.join(map(repr, specs))}: pass compression= again, and read what "
            "compressors remembered with load_compressor_state(model.optimizer, filepath)",
            stacklevel=3,
        )


def _is_of_keras_2(path: Path) -> bool:
    """Whether a model was saved by tf_keras, or an older Keras."""
    if path.is_dir():  # a SavedModel, which Keras 3 does not load
        return True
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            version = json.loads(archive.read("metadata.json"))["keras_version"]
    else:
        import h5py  # Keras needs it, too

        with h5py.File(path) as file:
            version = file.attrs.get("keras_version", "")
    return str(version).startswith("2.")
