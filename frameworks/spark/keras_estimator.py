"""``KerasEstimator``: ``fit`` a Keras model to a frame on ranks, ``transform`` others with it."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringlet.job.objects import allgather_object
from ringlet.job.requirements import need
from ringlet.ring.errors import LaunchError
from ringlet.ring.launch.signed_pickle import pickler
from ringlet.spark.estimator import Checkpoints, Fitted, RankEstimator, RankModel, Training
from ringlet.spark.parquet_data import Array, Batch, Share

BACKEND = "KERAS_BACKEND"


@dataclass(frozen=True, kw_only=True)
class _KerasTraining(Training):
    """``model`` is what Keras writes of one; ``inputs`` are the shapes of its rows, if known."""

    parts: bytes  # pickled: what compile and fit are given
    inputs: tuple[tuple[int, ...], ...] | None
    outputs: int
    custom_objects: Mapping[str, Any]
    backend: str
    val_batch_size: int | None
    train_steps: int | None
    validation_steps: int | None
    backward_passes: int
    verbose: int


def _train(job: _KerasTraining) -> Fitted | None:
    """Train as one rank; return what rank 0 has."""
    import keras

    import ringlet.keras as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    _seed(job, 0, rank)
    model = _loaded(job)
    if job.precision is not None:
        hvd.apply_precision(model, job.precision)
    with keras.saving.custom_object_scope(dict(job.custom_objects)):
        given, callbacks = pickle.loads(job.parts)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.get(given.pop("optimizer")),
            compression=job.compression,
            backward_passes_per_step=job.backward_passes,
            precision=job.precision,
        )
        model.compile(optimizer, **given)
    checkpoints, history = Checkpoints(job, rank, size, "npz"), []
    if (kept := checkpoints.latest()) is not None:
        history = _restore(job, model, kept)
    share, held = job.shares(rank, size)
    steps = share.least // min(job.batch_size, share.least)
    steps = min(steps, job.train_steps or steps)
    batches = _steps(job, lambda epoch: job.epoch(share, epoch, rank)[1], steps)
    own: list[Any] = [
        _callback(on_epoch_begin=partial(_begin, job, batches, rank)),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    if held is not None:
        own.append(_callback(on_epoch_end=_Validation(job, model, held)))
    keep = _callback(on_epoch_end=_Keeping(checkpoints, model, history))
    if len(history) < job.epochs:
        model.fit(
            batches,
            shuffle=False,
            initial_epoch=len(history),
            epochs=job.epochs,
            callbacks=[*own, *callbacks, keep],
            verbose=job.verbose if rank == 0 else 0,
        )
    batches.close()
    if rank:
        return None
    first = next(share.batches(1))[0]
    widths = tuple(output.shape[1] for output in _outputs(job, model, first))
    return Fitted(pickle.dumps(model.get_weights()), history, widths)


def _steps(job: _KerasTraining, begin: Callable[[int], Iterator[Batch]], count: int) -> Any:
    """Return what Keras takes ``count`` batches from, in their order: those of ``.epoch``.

    Keras looks at the first ones before it trains, so they have to be there again.
    """
    import keras

    class Steps(keras.utils.PyDataset):  # type: ignore[misc]
        epoch = 0
        _batches: Any = None

        def __len__(self) -> int:
            return count

        def __getitem__(self, step: int) -> tuple[Any, ...]:
            if step == 0:
                self.close()
                self._batches = begin(self.epoch)
            return _given(job, next(self._batches))

        def close(self) -> None:
            if self._batches is not None:
                self._batches.close()

    return Steps()


def _given(job: _KerasTraining, batch: Batch) -> tuple[Any, ...]:
    """Return what ``fit`` takes: inputs, labels and, if there are any, weights of rows."""
    features, labels, weights = batch
    found = _inputs(job, features), _wanted(job, labels)
    return found if weights is None else (*found, np.ascontiguousarray(weights))


def _inputs(job: _KerasTraining, features: Array) -> Any:
    """Return the inputs of the model, which lie behind one another in ``features``."""
    features = np.ascontiguousarray(features)
    if job.inputs is None:
        return features
    widths = [int(np.prod(shape)) for shape in job.inputs]
    if sum(widths) != features.shape[1]:
        raise LaunchError(
            f"the model takes {' + '.join(map(str, widths))} numbers a row, but the feature columns"
            f" {', '.join(job.columns.features)} have {features.shape[1]}"
        )
    parts = np.split(features, np.cumsum(widths)[:-1], axis=1)
    shaped = [
        part.reshape(len(part), *shape) for part, shape in zip(parts, job.inputs, strict=True)
    ]
    return shaped[0] if len(shaped) == 1 else tuple(shaped)


def _wanted(job: _KerasTraining, labels: Array) -> Any:
    """Return the labels: all for the only output, or one column for each of several."""
    typed = np.ascontiguousarray(labels).astype(job.label_dtype, copy=False)
    if job.outputs == 1:
        return typed
    if typed.shape[1] != job.outputs:
        raise LaunchError(
            f"the model has {job.outputs} outputs, which take one number a row each, and the label"
            f" columns {', '.join(job.columns.labels)} have {typed.shape[1]}"
        )
    return tuple(np.split(typed, job.outputs, axis=1))


def _outputs(job: _KerasTraining, model: Any, features: Array) -> list[Array]:
    """Return what the model makes of rows: (rows, numbers) of each output."""
    found = model.predict_on_batch(_inputs(job, features))
    listed = found if isinstance(found, list | tuple) else [found]
    return [np.asarray(output, np.float32).reshape(len(features), -1) for output in listed]


# What is done before and after an epoch


def _begin(job: _KerasTraining, batches: Any, rank: int, epoch: int, logs: object = None) -> None:
    """Let an epoch be what it is in a run that goes on from there."""
    batches.epoch = epoch
    _seed(job, epoch, rank)


def _seed(job: _KerasTraining, epoch: int, rank: int) -> None:
    import keras

    keras.utils.set_random_seed(job.seed_of(epoch, rank))


def _callback(**functions: Callable[..., Any]) -> Any:
    import keras

    return keras.callbacks.LambdaCallback(**functions)


@dataclass
class _Validation:
    """Puts into the logs what a model comes to on the rows that are held out, of all ranks."""

    job: _KerasTraining
    model: Any
    held: Share

    def __call__(self, epoch: int, logs: dict[str, Any]) -> None:
        rows = self.job.val_batch_size or self.job.batch_size
        steps = -(-self.held.rows // rows)
        steps = min(steps, self.job.validation_steps or steps)
        batches = _steps(self.job, lambda _: self.held.batches(rows), steps)
        found = self.model.evaluate(batches, verbose=0, return_dict=True)
        batches.close()
        told = allgather_object((min(self.held.rows, steps * rows), found))
        total = sum(count for count, _ in told)
        for name in found:
            mean = sum(count * float(each[name]) for count, each in told) / total
            logs[f"val_{name}"] = mean


@dataclass
class _Keeping:
    """Keeps what every rank has, and notes what the epoch came to."""

    checkpoints: Checkpoints
    model: Any
    history: list[dict[str, float]]

    def __call__(self, epoch: int, logs: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in logs.items()}
        self.history.append({"epoch": float(epoch), **numbers})
        self.checkpoints.keep(epoch, _state(self.model, self.history))


def _state(model: Any, history: list[dict[str, float]]) -> bytes:
    """Return a checkpoint: an archive of NumPy's, of bytes, without pickles."""
    from ringlet.keras import compressor_state
    from ringlet.keras.optimizer_state import as_array

    parts = {f"arr_{i}": as_array(v).tobytes() for i, v in enumerate(_variables(model))}
    parts |= {"compressors": compressor_state(model.optimizer)}
    parts |= {"history": json.dumps(history).encode()}
    arrays: dict[str, Any] = {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
    with io.BytesIO() as file:
        np.savez(file, **arrays)
        return file.getvalue()


def _restore(job: _KerasTraining, model: Any, kept: bytes) -> list[dict[str, float]]:
    """Go on where a checkpoint was kept; return the history until then."""
    from ringlet.keras import set_compressor_state
    from ringlet.keras.optimizer_state import as_array

    variables = _variables(model)
    with np.load(io.BytesIO(kept), allow_pickle=False) as archive:
        state = dict(archive)
    arrays = [as_array(variable) for variable in variables]
    sizes = [state[name].size for name in state if name.startswith("arr_")]
    if sizes != [array.nbytes for array in arrays]:
        raise LaunchError(f"the checkpoint of run {job.run_id!r} is of another model or optimizer")
    for i, (variable, array) in enumerate(zip(variables, arrays, strict=True)):
        variable.assign(state[f"arr_{i}"].view(array.dtype).reshape(array.shape))
    set_compressor_state(model.optimizer, state["compressors"].tobytes())
    history: list[dict[str, float]] = json.loads(state["history"].tobytes())
    return history


def _variables(model: Any) -> list[Any]:
    """Return what changes while a model is trained: its seeds too, but not what metrics count."""
    from ringlet.keras.optimizer_state import state_variables

    counted = {id(variable) for variable in model.metrics_variables}
    own = [variable for variable in model.variables if id(variable) not in counted]
    return own + state_variables(model.optimizer, model.trainable_variables)


# The model


def _written(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def _loaded(job: _KerasTraining) -> Any:
    """Return the model as it was given, on the backend that it was made on."""
    if "keras" not in sys.modules:
        os.environ.setdefault(BACKEND, job.backend)
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(job.model)
        return keras.models.load_model(path, custom_objects=dict(job.custom_objects), compile=False)


def _predictor(job: _KerasTraining, state: bytes) -> Callable[[Array], Array]:
    model = _loaded(job)
    model.set_weights(pickle.loads(state))
    return lambda features: np.concatenate(_outputs(job, model, features), axis=1)


class KerasModel(RankModel):
    """A fitted model: ``transform(df)`` adds ``LABEL__output``, numbers or lists of numbers.

    ``history`` has the metrics of each epoch; ``get_model()`` returns the Keras model.
    """

    _predictor = staticmethod(_predictor)

    def get_model(self) -> Any:
        """Return the Keras model, with what it has learnt; it is not compiled."""
        model = _loaded(self._job)
        model.set_weights(pickle.loads(self._state))
        return model


class KerasEstimator(RankEstimator):
    """Fits a Keras 3 ``model`` to the columns of a frame, on ``num_proc`` ranks in Spark's tasks.

    - ``model`` has weights already; ``optimizer``, ``loss``, ``loss_weights``, ``metrics`` and
      ``weighted_metrics`` are what ``compile`` takes. ``custom_objects`` are classes of the model,
      by name, that Keras does not know.
    - A row's features are reshaped to the model's input, and shared out among several inputs in
      their order. A model of several outputs takes as many labels, of one number each.
    - ``callbacks`` are called on every rank, with metrics that are the same on all of them.
    - ``val_batch_size`` is for held-out rows (None: ``batch_size``), ``train_steps_per_epoch`` and
      ``validation_steps_per_epoch`` are the most steps that a rank takes; ``verbose`` is rank 0's.
    - ``backward_passes_per_step`` is that of ``ringlet.keras.DistributedOptimizer``.

    ``common`` are the arguments of ``RankEstimator``. Ranks run on the backend of Keras that this
    process has (KERAS_BACKEND). Raises ValueError for a model without weights.
    """

    _train = staticmethod(_train)

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Any,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: str,
        *,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        callbacks: Sequence[Any] = (),
        custom_objects: Mapping[str, Any] | None = None,
        val_batch_size: int | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        backward_passes_per_step: int = 1,
        verbose: int = 0,
        **common: Any,
    ) -> None:
        super().__init__(feature_cols, label_cols, store, **common)
        need("keras", "KerasEstimator")
        import keras

        if not model.built:
            raise ValueError(f"model {model.name!r} has no weights yet: build it first")
        counts = {
            "val_batch_size": val_batch_size,
            "train_steps_per_epoch": train_steps_per_epoch,
            "validation_steps_per_epoch": validation_steps_per_epoch,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: there has to be at least one")
        compiled = {
            "optimizer": optimizer,
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
        }
        backend = keras.backend.backend()
        self._launch["env"] = {BACKEND: backend, **(self._launch["env"] or {})}
        shapes = [tuple(given.shape[1:]) for given in getattr(model, "inputs", None) or ()]
        known = bool(shapes) and None not in [size for shape in shapes for size in shape]
        self._training = _KerasTraining(
            model=_written(model),
            parts=bytes(pickler().dumps((compiled, list(callbacks)))),
            inputs=tuple(shapes) if known else None,
            outputs=len(getattr(model, "outputs", None) or [None]),
            custom_objects=dict(custom_objects or {}),
            backend=backend,
            val_batch_size=val_batch_size,
            train_steps=train_steps_per_epoch,
            validation_steps=validation_steps_per_epoch,
            backward_passes=backward_passes_per_step,
            verbose=verbose,
            **self._common,
        )

    def _model(self, job: _KerasTraining, fitted: Fitted) -> KerasModel:
        return KerasModel(job, fitted)
