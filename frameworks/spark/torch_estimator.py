"""``TorchEstimator``: ``fit`` a torch model to a frame on ranks, ``transform`` others with it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlet.ring.errors import LaunchError
from ringlet.spark.estimator import Checkpoints, Fitted, RankEstimator, RankModel, Training
from ringlet.spark.parquet_data import Array, Batch


@dataclass(frozen=True, kw_only=True)
class _TorchTraining(Training):
    optimizer: Callable[..., Any]
    loss: Callable[..., Any]
    input_shape: tuple[int, ...] | None


def _train(job: _TorchTraining) -> Fitted | None:
    """Train as one rank; return what rank 0 has."""
    import torch

    import ringlet.torch as hvd

    hvd.init()
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
    checkpoints = Checkpoints(job, rank, size, "pt")
    history: list[dict[str, float]] = []
    if (kept := checkpoints.latest()) is not None:
        state = torch.load(io.BytesIO(kept), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history = state["history"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    share, held = job.shares(rank, size)
    for epoch in range(len(history), job.epochs):
        torch.manual_seed(job.seed_of(epoch, rank))
        model.train()
        total = torch.zeros(2, dtype=torch.float64)
        steps, batches = job.epoch(share, epoch, rank)
        for _, batch in zip(range(steps), batches, strict=False):
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
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.keep(epoch, _saved({**parts, "history": history}))
    model.eval()
    with torch.no_grad():
        first = next(iter(share.batches(1)))
        width = int(model(_inputs(job, first[0])).reshape(1, -1).shape[1])
    if rank:
        return None
    labels = len(job.columns.labels)
    return Fitted(
        _saved(model.state_dict()), history, (1,) * labels if width == labels else (width,)
    )


def _saved(state: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _inputs(job: _TorchTraining, features: Any) -> Any:
    import torch

    shape = features.shape[1:] if job.input_shape is None else job.input_shape
    return torch.from_numpy(np.ascontiguousarray(features)).reshape(len(features), *shape)


def _loss(job: _TorchTraining, model: Any, batch: Batch) -> tuple[Any, float]:
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
    total = weight.sum()  # 0 where none of these rows counts
    return (rows.reshape(-1) * weight).sum() / total.clamp(min=1e-30), float(total)


def _mean(total: Any) -> float:
    import ringlet.torch as hvd

    value, weight = hvd.allreduce(total, op=hvd.Sum)
    return float(value / weight)


def _loaded(model: Any, state: bytes) -> Any:
    import torch

    model.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    return model.eval()


def _predictor(job: _TorchTraining, state: bytes) -> Callable[[Array], Array]:
    import torch

    model = _loaded(job.model, state)

    def predict(features: Array) -> Array:
        with torch.no_grad():
            outputs = model(_inputs(job, features))
        found: Array = outputs.reshape(len(features), -1).float().numpy()
        return found

    return predict


class TorchModel(RankModel):
    """A fitted model: ``transform(df)`` adds ``LABEL__output``, numbers or lists of numbers.

    ``history`` has the losses of each epoch; ``get_model()`` returns the torch model.
    """

    _predictor = staticmethod(_predictor)

    def get_model(self) -> Any:
        """Return a torch model of its own, with what was learnt."""
        return _loaded(copy.deepcopy(self._job.model), self._state)


class TorchEstimator(RankEstimator):
    """Fits a torch ``model`` to the columns of a frame, on ``num_proc`` ranks in Spark's tasks.

    - ``optimizer`` makes the optimizer of ``model.parameters()``, as ``lambda p: SGD(p, 0.1)``;
      ``loss(outputs, labels)`` returns a number, or, with ``sample_weight_col``, one for each row.
    - Rows of features are of ``input_shape`` if that is given. Labels are (rows, labels) of
      ``label_dtype``; a single integer label is (rows,), as cross entropy takes it.

    ``common`` are the arguments of ``RankEstimator``.
    """

    _train = staticmethod(_train)

    def __init__(
        self,
        model: Any,
        optimizer: Callable[..., Any],
        loss: Callable[..., Any],
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: str,
        *,
        input_shape: Sequence[int] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(feature_cols, label_cols, store, **common)
        shape = None if input_shape is None else tuple(input_shape)
        self._training = _TorchTraining(
            model=model, loss=loss, optimizer=optimizer, input_shape=shape, **self._common
        )

    def _model(self, job: _TorchTraining, fitted: Fitted) -> TorchModel:
        return TorchModel(job, fitted)
