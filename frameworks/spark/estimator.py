"""What estimators have in common: parameters, data, checkpoints, fitted models."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from pyspark.ml.base import Estimator, Model

from ringlet.job.objects import allgather_object, broadcast_object
from ringlet.ring.callers import debugging, public
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.spark.barrier_job import run
from ringlet.spark.parquet_data import Array, Batch, Columns, Share, feature_list, write

TRAINING, HELD_OUT = "intermediate_train_data", "intermediate_val_data"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a rank needs to train, besides the framework's own."""

    model: Any
    columns: Columns
    path: str
    run_id: str
    epochs: int
    batch_size: int
    ahead: int
    seed: int
    compression: Any
    precision: str | None
    label_dtype: str
    validation: bool = False

    def shares(self, rank: int, size: int) -> tuple[Share, Share | None]:
        """Return a rank's share of the rows to train with, and of those that are held out."""
        held = Share(f"{self.path}/{HELD_OUT}", rank, size) if self.validation else None
        return Share(f"{self.path}/{TRAINING}", rank, size), held

    def epoch(self, share: Share, epoch: int, rank: int) -> tuple[int, Iterator[Batch]]:
        """Return how many steps an epoch has, on every rank, and its batches, which may be more."""
        rows = min(self.batch_size, share.least)
        generator = np.random.default_rng([self.seed, epoch, rank]) if self.ahead else None
        return share.least // rows, share.batches(rows, generator, self.ahead)

    def seed_of(self, epoch: int, rank: int) -> int:
        """Return the seed of what layers draw at random: no two ranks and epochs are alike."""
        return int(np.random.SeedSequence([self.seed, epoch, rank]).generate_state(1)[0])


@dataclass(frozen=True)
class Fitted:
    """What training comes to: the model's state, losses by epoch, how wide each output is."""

    state: bytes
    history: list[dict[str, float]]
    widths: tuple[int, ...]


def _new_run() -> str:
    return f"run-{uuid.uuid4().hex[:12]}"


class RankEstimator(Estimator, ABC):  # type: ignore[misc]  # Spark may be absent when types are checked
    """Fits a model to the columns of a frame, on ``num_proc`` ranks in Spark's tasks.

    - ``feature_cols`` (numbers, lists of numbers, vectors) are joined to one float32 vector a row,
      ``label_cols`` to (rows, labels) of ``label_dtype``.
    - ``store`` is a path, or URL of fsspec's, that Spark and all ranks reach: data go there as
      Parquet (``intermediate_train_data``), checkpoints to ``runs/RUN_ID/checkpoint``. An
      estimator with the ``run_id`` of a fit that ended early goes on where that was. Without one,
      each fit is a new run, whose ID is ``run_id`` from then on.
    - ``validation`` is the share of rows (0 to 1) that are held out for ``val_loss``, or the name
      of a column that is true, or not 0, in those rows.
    - ``compression`` is a spec such as "int8 | ef", ``precision`` a policy.
    - Rows are shuffled among ``shuffle_buffer_size`` that are held in memory; None: not shuffled.

    What begins a step are the rows that every rank has: a few rows are left out of each epoch where
    they cannot be shared equally. ``restarts``, ``start_timeout`` and ``env`` are those of ``run``.
    """

    _train: ClassVar[staticmethod[[Any], Fitted | None]]  # called on every rank; rank 0's counts
    _training: Any

    def __init__(
        self,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: str,
        *,
        num_proc: int | None = None,
        epochs: int = 1,
        batch_size: int = 32,
        validation: float | str = 0.0,
        sample_weight_col: str | None = None,
        compression: Any = "none",
        precision: str | None = None,
        shuffle_buffer_size: int | None = 1 << 16,
        random_seed: int = 0,
        label_dtype: str = "float32",
        run_id: str | None = None,
        restarts: int = 0,
        start_timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"epochs": epochs, "batch_size": batch_size}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: there has to be at least one")
        if not isinstance(validation, str) and not 0 <= validation < 1:
            raise ValueError(f"validation={validation} is not a share from 0 to below 1")
        if not feature_cols or not label_cols or isinstance(feature_cols, str):
            raise ValueError("feature_cols and label_cols are lists of names of columns")
        Options(compression=compression, precision=precision).settings()  # not on ranks first
        self._given_run_id = run_id
        self.run_id = run_id or _new_run()
        self._store, self._validation = store.rstrip("/"), validation
        self._launch: dict[str, Any] = {
            "num_proc": num_proc, "restarts": restarts, "start_timeout": start_timeout, "env": env,
        }  # fmt: skip
        self._common: dict[str, Any] = {
            "columns": Columns(tuple(feature_cols), tuple(label_cols), sample_weight_col),
            "path": self._store,
            "run_id": self.run_id,
            "epochs": epochs,
            "batch_size": batch_size,
            "ahead": shuffle_buffer_size or 0,
            "seed": random_seed,
            "compression": compression,
            "precision": precision,
            "label_dtype": label_dtype,
        }

    @public
    def _fit(self, dataset: Any) -> RankModel:
        columns, files = self._training.columns, self._launch["num_proc"]
        session = dataset.sparkSession
        if files is None:
            files = session.sparkContext.defaultParallelism
        training, held_out = self._split(dataset)
        write(training, columns, f"{self._store}/{TRAINING}", files)
        if held_out is not None:
            write(held_out, columns, f"{self._store}/{HELD_OUT}", files)
        return self._trained(session)

    def _split(self, dataset: Any) -> tuple[Any, Any]:
        """Return the rows to train with, and those that are held out, None for none."""
        from pyspark.sql import functions

        if not self._validation:
            return dataset, None
        if not isinstance(self._validation, str):
            shares = [1 - self._validation, self._validation]
            training, held_out = dataset.randomSplit(shares, self._training.seed)
            return training, held_out
        if self._validation not in dataset.columns:
            raise LaunchError(
                f"validation column {self._validation!r} is missing; the frame has"
                f" {', '.join(dataset.columns)}"
            )
        chosen = functions.col(self._validation).cast("boolean")
        chosen = functions.coalesce(chosen, functions.lit(False))
        return dataset.filter(~chosen), dataset.filter(chosen)

    @public
    def fit_on_parquet(self, spark: Any) -> RankModel:
        """Fit to what an earlier ``fit`` has left in the store."""
        return self._trained(spark)

    def _trained(self, session: Any) -> RankModel:
        # One of its own for each fit: else a second one would find all epochs of the first done.
        run_id = self.run_id = self._given_run_id or _new_run()
        job = replace(self._training, validation=bool(self._validation), run_id=run_id)
        train = type(self)._train
        try:
            fitted, *_ = run(train, (job,), spark=session, **self._launch)
        except WorkerFailed as failed:
            refused = failed.__cause__
            if isinstance(refused, LaunchError) and not debugging():
                said = f"rank {failed.rank}: {refused}"  # without the stack, which is ours
                raise WorkerFailed(said, failed.rank, failed.traceback) from None
            raise
        return self._model(job, fitted)

    @abstractmethod
    def _model(self, job: Any, fitted: Fitted) -> RankModel:
        """Return what ``fit`` does."""


class Checkpoints:
    """What all ranks keep after an epoch: complete once rank 0 has said which epoch it is of."""

    def __init__(self, job: Training, rank: int, size: int, ending: str) -> None:
        import fsspec

        self._files, self._path = fsspec.core.url_to_fs(f"{job.path}/runs/{job.run_id}/checkpoint")
        self._rank, self._size, self._ending = rank, size, ending

    def _name(self, epoch: int) -> str:
        return f"{self._path}/epoch-{epoch}/rank-{self._rank}.{self._ending}"

    def latest(self) -> bytes | None:
        """Return what this rank has kept last, None if nothing was kept. Collective.

        Raises LaunchError where another number of ranks has kept it.
        """
        said = None
        marker = f"{self._path}/latest.json"
        if self._rank == 0 and self._files.exists(marker):
            with self._files.open(marker) as file:
                said = json.load(file)
        said = broadcast_object(said)
        if said is None:
            return None
        if said["size"] != self._size:
            raise LaunchError(
                f"the checkpoint at {self._path} is of {said['size']} ranks, not of {self._size}:"
                " take as many, or another run_id"
            )
        with self._files.open(self._name(said["epoch"])) as file:
            return bytes(file.read())

    def keep(self, epoch: int, state: bytes) -> None:
        """Keep the state of all ranks. Collective."""
        name = self._name(epoch)
        self._files.makedirs(name.rpartition("/")[0], exist_ok=True)
        with self._files.open(name, "wb") as file:
            file.write(state)
        allgather_object(None)  # all have written theirs
        if self._rank == 0:
            with self._files.open(f"{self._path}/latest.json", "w") as file:
                json.dump({"epoch": epoch, "size": self._size}, file)
        allgather_object(None)  # nobody looks for the last epoch's any more
        if epoch and self._files.exists(self._name(epoch - 1)):
            self._files.rm(self._name(epoch - 1))


class RankModel(Model, ABC):  # type: ignore[misc]
    """A fitted model: ``transform(df)`` adds ``LABEL__output``, numbers or lists of numbers.

    ``history`` has the losses of each epoch; ``get_model()`` returns the framework's model.
    """

    # Returns, in a task, the function that turns features into outputs: (rows, widths added up).
    _predictor: ClassVar[staticmethod[[Any, bytes], Callable[[Array], Array]]]

    def __init__(self, job: Any, fitted: Fitted) -> None:
        super().__init__()
        self.history = fitted.history
        self._job, self._state, self._widths = job, fitted.state, fitted.widths

    @abstractmethod
    def get_model(self) -> Any:
        """Return the framework's model, with what it has learnt."""

    def _transform(self, dataset: Any) -> Any:
        from pyspark.sql import functions

        labels = self._job.columns.labels
        load = partial(type(self)._predictor, self._job, self._state)
        apply = functions.pandas_udf(_applier(load), "array<float>")
        made = apply(feature_list(dataset, self._job.columns))
        outputs = self._widths if len(self._widths) == len(labels) else (sum(self._widths),)
        start = 0
        for label, width in zip(labels, outputs, strict=False):
            output = made[start] if width == 1 else functions.slice(made, start + 1, width)
            dataset = dataset.withColumn(f"{label}__output", output)
            start += width
        return dataset


def _applier(load: Callable[[], Callable[[Array], Array]]) -> Callable[..., Any]:
    import pandas

    def apply(batches: Any) -> Any:
        predict = load()
        for features in batches:
            if len(features):
                outputs = predict(np.stack(features.to_numpy()).astype(np.float32))
                yield pandas.Series(list(outputs))
            else:
                yield pandas.Series([], dtype=object)

    # Spark looks at these, and names in strings it does not find.
    each = Iterator[pandas.Series]
    apply.__annotations__ = {"batches": each, "return": each}
    return apply
