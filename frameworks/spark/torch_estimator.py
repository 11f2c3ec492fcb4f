"""``TorchEstimator``: ``fit`` a torch model to a frame on ranks, ``transform`` others with it."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pyspark.ml.base import Estimator, Model

from ringlet.ring.errors import LaunchError
from ringlet.spark.barrier_job import run
from ringlet.spark.parquet_data import Batch, Columns, Share, feature_list, write


@dataclass(frozen=True)
class _Training:
    """What a rank needs to train."""

    model: Any
    optimizer: Callable[..., Any]
    loss: Callable[..., Any]
    columns: Columns
    path: str
    epochs: int
    batch_size: int
    ahead: int
    seed: int
    compression: str
    precision: str | None
    label_dtype: str
    input_shape: tuple[int, ...] | None
    validation: bool = False


class TorchEstimator(Estimator):  # type: ignore[misc]  # Spark may be absent when types are checked
    """Fits ``model`` to the columns of a frame, on ``num_proc`` ranks in Spark's tasks.

    - ``optimizer`` makes the optimizer of ``model.parameters()``, as ``lambda p: SGD(p, 0.1)``;
      ``loss(outputs, labels)`` returns a number, or, with ``sample_weight_col``, one for each row.
    - ``feature_cols`` (numbers, lists of numbers, vectors) are joined to one float32 vector a row,
      of ``input_shape`` if that is given. ``label_cols`` are joined to (rows, labels) of
      ``label_dtype``; a single integer label is (rows,), as cross entropy takes it.
    - ``store`` is a path, or URL of fsspec's, that Spark and all ranks reach: data go there as
      Parquet (``intermediate_train_data``), checkpoints to ``runs/RUN_ID/checkpoint``. An
      estimator with the ``run_id`` of one that ended early goes on where that was.
    - ``validation`` is the share of rows (0 to 1) that are held out for ``val_loss``.
    - ``compression`` is a spec such as "int8 | ef", ``precision`` a policy.
    - Rows are shuffled among ``shuffle_buffer_size`` that are held in memory; None: not shuffled.

    What begins a step are the rows that every rank has: a few rows are left out of each epoch where
    they cannot be shared equally. ``restarts`` and ``start_timeout`` are those of ``run``.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Callable[..., Any],
        loss: Callable[..., Any],
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: str,
        *,
        num_proc: int | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        validation: float = 0.0,
        sample_weight_col: str | None = None,
        compression: str = "none",
        precision: str | None = None,
        shuffle_buffer_size: int | None = 1 << 16,
        random_seed: int = 0,
        label_dtype: str = "float32",
        input_shape: Sequence[int] | None = None,
        run_id: str | None = None,
        restarts: int = 0,
        start_timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"epochs": epochs, "batch_size": batch_size}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: there has to be at least one")
        if not 0 <= validation < 1:
            raise ValueError(f"validation={validation} is not a share from 0 to below 1")
        if not feature_cols or not label_cols or isinstance(feature_cols, str):
            raise ValueError("feature_cols and label_cols are lists of names of columns")
        self.run_id = run_id or f"run-{uuid.uuid4().hex[:12]}"
        self._store, self._validation = store.rstrip("/"), validation
        self._launch: dict[str, Any] = {
            "num_proc": num_proc, "restarts": restarts, "start_timeout": start_timeout, "env": env,
        }  # fmt: skip
        self._training = _Training(
            model,
            optimizer,
            loss,
            Columns(tuple(feature_cols), tuple(label_cols), sample_weight_col),
            self._store,
            epochs,
            batch_size,
            shuffle_buffer_size or 0,
            random_seed,
            compression,
            precision,
            label_dtype,
            None if input_shape is None else tuple(input_shape),
        )

    def _fit(self, dataset: Any) -> TorchModel:
        columns, files = self._training.columns, self._launch["num_proc"]
        session = dataset.sparkSession
        if files is None:
            files = session.sparkContext.defaultParallelism
        seed = self._training.seed
        training, held_out = dataset, None
        if self._validation:
            weights = [1 - self._validation, self._validation]
            training, held_out = dataset.randomSplit(weights, seed)
        write(training, columns, f"{self._store}/intermediate_train_data", files)
        if held_out is not None:
            write(held_out, columns, f"{self._store}/intermediate_val_data", files)
        return self._trained(session, held_out is not None)

    def fit_on_parquet(self, spark: Any) -> TorchModel:
        """Fit to what an earlier ``fit`` has left in the store."""
        return self._trained(spark, bool(self._validation))

    def _trained(self, session: Any, validation: bool) -> TorchModel:
        job = replace(self._training, validation=validation)
        (state, history, width), *_ = run(_train, (job, self.run_id), spark=session, **self._launch)
        return TorchModel(job, state, history, width)


def _train(job: _Training, run_id: str) -> tuple[bytes, list[dict[str, float]], int] | None:
    """Train as one rank; rank 0 returns the model's state, the history and the width of outputs."""
    import torch

    import ringlet.torch as hvd

    hvd.init()
    torch.manual_seed(job.seed)
    rank, size = hvd.rank(), hvd.size()
    model: Any = job.model
    named = list(model.named_parameters())
    options: dict[str, Any] = {} if job.precision is None else {"precision": job.precision}
    optimizer = hvd.DistributedOptimizer(
        job.optimizer(model.parameters()),
        named_parameters=named,
        compression=job.compression,
        **options,
    )
    checkpoints = _Checkpoints(f"{job.path}/runs/{run_id}/checkpoint", rank, size)
    history: list[dict[str, float]] = []
    if (state := checkpoints.latest()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history = state["history"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    share = Share(f"{job.path}/intermediate_train_data", rank, size)
    held = Share(f"{job.path}/intermediate_val_data", rank, size) if job.validation else None
    rows = min(job.batch_size, share.least)
    for epoch in range(len(history), job.epochs):
        model.train()
        generator = np.random.default_rng([job.seed, epoch, rank]) if job.ahead else None
        total = torch.zeros(2, dtype=torch.float64)
        batches = share.batches(rows, generator, job.ahead)
        for _, batch in zip(range(share.least // rows), batches, strict=False):
            optimizer.zero_grad()
            loss, weight = _loss(job, model, batch)
            loss.backward()
            optimizer.step()
            total += torch.tensor([float(loss.detach()) * weight, weight])
        batches.close()  # type: ignore[attr-defined]
        done = {"epoch": float(epoch), "loss": _mean(total)}
        if held is not None:
            model.eval()
            total.zero_()
            with torch.no_grad():
                for batch in held.batches(job.batch_size):
                    loss, weight = _loss(job, model, batch)
                    total += torch.tensor([float(loss) * weight, weight])
            done["val_loss"] = _mean(total)
        history.append(done)
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.keep(epoch, {**kept, "history": history})
    model.eval()
    with torch.no_grad():
        first = next(iter(share.batches(1)))
        width = int(model(_inputs(job, first[0])).reshape(1, -1).shape[1])
    if rank:
        return None
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue(), history, width


def _inputs(job: _Training, features: Any) -> Any:
    import torch

    shape = features.shape[1:] if job.input_shape is None else job.input_shape
    return torch.from_numpy(np.ascontiguousarray(features)).reshape(len(features), *shape)


def _loss(job: _Training, model: Any, batch: Batch) -> tuple[Any, float]:
    """Return the mean loss of a batch, and the weight that it stands for."""
    import torch

    features, labels, weights = batch
    wanted = torch.from_numpy(np.ascontiguousarray(labels)).to(getattr(torch, job.label_dtype))
    if not wanted.dtype.is_floating_point and wanted.shape[1] == 1:
        wanted = wanted[:, 0]
    loss = job.loss(model(_inputs(job, features)), wanted)
    if weights is None:
        return loss, float(len(features))
    rows = loss.reshape(len(features), -1).mean(1) if loss.numel() >= len(features) > 1 else loss
    if rows.numel() != len(features):
        raise LaunchError(
            "with sample_weight_col the loss has to return one number a row (reduction='none'),"
            f" not {tuple(loss.shape)} for {len(features)} rows"
        )
    weight = torch.from_numpy(np.array(weights, np.float32))
    return (rows.reshape(-1) * weight).sum() / weight.sum(), float(weight.sum())


def _mean(total: Any) -> float:
    import ringlet.torch as hvd

    value, weight = hvd.allreduce(total, op=hvd.Sum)
    return float(value / weight)


class _Checkpoints:
    """What all ranks keep after an epoch: complete once rank 0 has said which epoch it is of."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        import fsspec

        self._files, self._path = fsspec.core.url_to_fs(path)
        self._rank, self._size = rank, size

    def _name(self, epoch: int) -> str:
        return f"{self._path}/epoch-{epoch}/rank-{self._rank}.pt"

    def latest(self) -> Any:
        """Return what this rank has kept last, None if nothing was kept by as many ranks."""
        import torch

        import ringlet.torch as hvd

        said = None
        marker = f"{self._path}/latest.json"
        if self._rank == 0 and self._files.exists(marker):
            with self._files.open(marker) as file:
                said = json.load(file)
        said = hvd.broadcast_object(said, root_rank=0)
        if said is None:
            return None
        if said["size"] != self._size:
            raise LaunchError(
                f"the checkpoint at {self._path} is of {said['size']} ranks, not of {self._size}:"
                " take as many, or another run_id"
            )
        with self._files.open(self._name(said["epoch"])) as file:
            return torch.load(file, weights_only=False)

    def keep(self, epoch: int, state: Any) -> None:
        """Keep the state of all ranks."""
        import torch

        import ringlet.torch as hvd

        name = self._name(epoch)
        self._files.makedirs(name.rpartition("/")[0], exist_ok=True)
        with self._files.open(name, "wb") as file:
            torch.save(state, file)
        hvd.barrier()
        if self._rank == 0:
            with self._files.open(f"{self._path}/latest.json", "w") as file:
                json.dump({"epoch": epoch, "size": self._size}, file)
        hvd.barrier()
        if epoch and self._files.exists(self._name(epoch - 1)):
            self._files.rm(self._name(epoch - 1))


class TorchModel(Model):  # type: ignore[misc]
    """A fitted model: ``transform(df)`` adds ``LABEL__output``, numbers or lists of numbers.

    ``history`` has the losses of each epoch; ``get_model()`` returns the torch model.
    """

    def __init__(
        self, job: _Training, state: bytes, history: list[dict[str, float]], width: int
    ) -> None:
        super().__init__()
        self.history = history
        self._job, self._state, self._width = job, state, width

    def get_model(self) -> Any:
        """Return the torch model, with what it has learnt."""
        return _loaded(self._job.model, self._state)

    def _transform(self, dataset: Any) -> Any:
        from pyspark.sql import functions

        labels = self._job.columns.labels
        each = len(labels) > 1 and self._width == len(labels)
        apply = functions.pandas_udf(_applier(self._job, self._state), "array<float>")
        made = apply(feature_list(dataset, self._job.columns))
        if self._width == 1 or each:
            for i, label in enumerate(labels if each else labels[:1]):
                dataset = dataset.withColumn(f"{label}__output", made[i])
            return dataset
        return dataset.withColumn(f"{labels[0]}__output", made)


def _loaded(model: Any, state: bytes) -> Any:
    import torch

    model.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    return model.eval()


def _applier(job: _Training, state: bytes) -> Callable[[Any], Any]:
    import pandas

    def apply(features: Any) -> Any:
        import torch

        model = _loaded(job.model, state)
        if not len(features):
            return pandas.Series([], dtype=object)
        with torch.no_grad():
            outputs = model(_inputs(job, np.stack(features.to_numpy()).astype(np.float32)))
        return pandas.Series(list(outputs.reshape(len(features), -1).float().numpy()))

    # Spark looks at these, and names in strings it does not find.
    apply.__annotations__ = {"features": pandas.Series, "return": pandas.Series}
    return apply
