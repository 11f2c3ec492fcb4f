"""Callbacks for ``model.fit`` on several ranks, of models of Keras 3 and of tf_keras."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ringlet.job.objects import allgather_object
from ringlet.job.process_sets import global_process_set
from ringlet.job.session import current
from ringlet.keras.callback_base import KerasCallback
from ringlet.keras.checkpoint import (
    load_compressor_state,
    reducer_of,
    residuals_beside,
    save_compressor_state,
    state_path,
)
from ringlet.keras.optimizer_state import learning_rate, scale_velocities, state_variables
from ringlet.keras.value_collectives import averaged, broadcast_variables
from ringlet.ring.callers import outside
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.argument_kinds import number
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.model_agreement import agree
from ringlet.shared.residual_store import warn_of_other_ranks
from ringlet.shared.variable_names import identity


class BroadcastGlobalVariablesCallback(KerasCallback):
    """Start all ranks from rank ``root_rank``'s weights and optimizer state.

    Before the first batch, or after it where the model of some rank has no weights until then.
    Random seeds stay each rank's own. Warns where Keras's own training step applies each rank's own
    gradients, at the start or, where it is that of a former optimizer, after an epoch.
    ``local_variables`` stay as they are on each rank; ValueError for what is no variable.
    ``device`` is accepted for Horovod's sake.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._left_out: set[int] = set()
        for variable in () if local_variables is None else local_variables:
            self.register_local_var(variable)
        self._done = False
        self._batches = 0
        self._calls: int | None = None  # of what reduces, before; None where nothing looks at it

    def register_local_var(self, variable: Any) -> None:
        """Leave ``variable`` as it is on this rank. Raises ValueError for what is no variable."""
        if not hasattr(variable, "assign"):
            raise ValueError(f"local variables are variables, not {type(variable).__name__}")
        self._left_out.add(identity(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if all ranks have something to broadcast."""
        self._done = False
        reducer, self._batches = _reducer(self.model), 0
        looks = current().rank == self.root_rank and current().size > 1
        looks = looks and _steps_as_keras(self.model)
        self._calls = reducer.calls if reducer is not None and looks else None
        if current().rank == self.root_rank and _trains_alone(self.model):
            warnings.warn(
                f"{type(self.model.optimizer).__name__}, the model's optimizer, is no "
                "DistributedOptimizer, so every rank trains a model of its own: wrap it before "
                "compile(), and load saved models with hvd.load_model. A copy of a model, by "
                "deepcopy or compile_from_config, has to be compiled again",
                stacklevel=outside(),
            )
        built = bool(self.model.built and self.model.weights)
        if averaged([built], "keras.broadcast_variables.built")[0] == 1.0:
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch if that was not possible before."""
        self._batches += 1
        if not self._done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Warn of a training step that was made for another optimizer, which it still applies."""
        reducer = _reducer(self.model)
        if reducer is None or self._calls is None:
            return
        if reducer.calls > self._calls or not self.model.trainable_variables:
            self._calls = None
        # One more, as JAX may still be at the last.
        elif self._batches > self.model.optimizer._ringlet_accumulator.passes:
            self._calls = None
            warnings.warn(
                f"{type(self.model.optimizer).__name__}, the model's optimizer, has reduced no "
                "gradients, so every rank trains a model of its own: the training step was made "
                "for another optimizer. Call compile() with the DistributedOptimizer",
                stacklevel=outside(),
            )

    def _broadcast(self) -> None:
        optimizer, own = getattr(self.model, "optimizer", None), self.model.trainable_variables
        state = [] if optimizer is None else state_variables(optimizer, own)
        every = [*self.model.weights, *state]
        shared = [v for v in every if identity(v) not in self._left_out]
        broadcast_variables(shared, self.root_rank)
        self._done = True


def _trains_alone(model: Any) -> bool:
    """Whether Keras's own training step applies gradients that no other rank has a part in."""
    optimizer = getattr(model, "optimizer", None)
    pair = optimizer, getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
    if current().size == 1 or any(hasattr(each, "_ringlet") for each in pair):
        return False
    return _steps_as_keras(model) and _is_of_keras(type(optimizer))


def _steps_as_keras(model: Any) -> bool:
    return _is_of_keras(getattr(type(model), "train_step", None))


def _is_of_keras(each: Any) -> bool:
    return getattr(each, "__module__", "").partition(".")[0] in _KERAS


def _reducer(model: Any) -> GradientReducer | None:
    """Return what reduces the gradients of a model's DistributedOptimizer, if it has one."""
    found = getattr(getattr(model, "optimizer", None), "_ringlet", None)
    return found if isinstance(found, GradientReducer) else None


_KERAS = ("keras", "tf_keras")
_SAME_METRICS = (
    "every rank has to report the same metrics: pass the same metrics= and loss= to compile(), and "
    "validation_data= on all ranks or on none"
)


_NO_NUMBER = "which is no number"
_ONLY_NUMBERS = (
    "MetricAverageCallback averages numbers and arrays of them: leave the metric out of logs on "
    "all ranks, put the callback that adds it behind this one, or let every rank report a number"
)


def _numbers(value: Any) -> Any:
    """Return a metric as an array of float64; None where it is none, such as None or a text."""
    try:
        return np.asarray(value, np.float64) if np.shape(value) else np.array(float(value))
    except Exception:  # of whatever the value's library raises
        return None


def _described(array: Any, value: Any) -> str:
    """Return what ranks compare of a metric, in words: its shape, or what it is else."""
    if array is None:
        return f"{value!r:.40}, {_NO_NUMBER}"
    return str([*array.shape]) if array.shape else "a number"


class MetricAverageCallback(KerasCallback):
    """Average an epoch's metrics over all ranks; put it before callbacks that look at them.

    A metric is a number, or an array of any shape, as of ``F1Score``; its mean is a float or a
    float64 array. Raises Mismatch, on all ranks, where they have other metrics, or other shapes of
    them, where one has fewer batches in an epoch, or fewer epochs, or where they are in different
    epochs; TypeError, on all ranks, naming the metric and the ranks where one is no number, such as
    None. ``device`` is accepted for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Overwrite the numbers and arrays in ``logs``."""
        if (reducer := _reducer(self.model)) is not None:  # else ranks might wait for each other
            reducer.end_epoch(epoch + 1)  # as fit prints it
        logs = {} if logs is None else logs
        names = sorted(logs)
        # Before ranks meet: one that fails alone would leave the others waiting.
        arrays = {name: _numbers(logs[name]) for name in names}
        items = [(name, _described(arrays[name], logs[name])) for name in names]
        try:
            agree("metrics", "metrics", items, global_process_set, _SAME_METRICS)
        except Mismatch as error:  # of the same text on all ranks
            if _NO_NUMBER not in str(error):
                raise
            told = str(error).removesuffix(f"; {_SAME_METRICS}")
            raise TypeError(f"{told}. {_ONLY_NUMBERS}") from None
        for name, words in items:
            if _NO_NUMBER in words:
                raise TypeError(f"metrics: {name!r} is {words} on all ranks. {_ONLY_NUMBERS}")
        if not names:
            return
        values = [value for array in arrays.values() for value in array.ravel().tolist()]
        means = iter(averaged(values, "metrics"))
        for name, array in arrays.items():
            of_one = [next(means) for _ in range(array.size)]
            logs[name] = np.reshape(of_one, array.shape) if array.shape else of_one[0]

    def on_train_end(self, logs: Any = None) -> None:
        """Find out whether training ends on all ranks."""
        if (reducer := _reducer(self.model)) is not None:
            reducer.end_training()


_MULTIPLIER = "a number or a function of the epoch"


class LearningRateScheduleCallback(KerasCallback):
    """Set the learning rate to ``initial_lr`` times ``multiplier(epoch)``.

    ``multiplier`` is a function of the epoch or a constant, and applies from ``start_epoch`` to
    before ``end_epoch``. With ``staircase`` it is called at the start of epochs, otherwise before
    each batch with fractions of epochs, for which ``steps_per_epoch`` is needed where ``fit`` does
    not know it. With ``momentum_correction`` SGD's momentum is scaled with the rate (Goyal et al.,
    2017, section 2). Raises TypeError for what is no number and no function, ValueError for a rate
    that is not above 0.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None or not 0 < number(initial_lr, "initial_lr") < math.inf:
            raise ValueError(f"initial_lr must be above 0 and finite, got {initial_lr}")
        if not callable(multiplier) and math.isnan(number(multiplier, "multiplier", _MULTIPLIER)):
            raise ValueError(f"multiplier must be a number, got {multiplier}")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, or None, got {steps_per_epoch}")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase if callable(multiplier) else True
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._multiplier = multiplier
        self._epoch = 0

    def multiplier(self, epoch: float) -> float:
        """Return the factor at ``epoch``, which may be a fraction."""
        return self._multiplier(epoch) if callable(self._multiplier) else self._multiplier

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError("pass steps_per_epoch: fit does not know how many batches there are")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the rate of an epoch."""
        self._epoch = epoch
        if self.staircase and self._applies():
            self._set(self.multiplier(epoch))

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of a batch."""
        if not self.staircase and self._applies():
            assert self.steps_per_epoch
            self._set(self.multiplier(self._epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the rate as the metric ``lr``."""
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer)

    def _applies(self) -> bool:
        end = float("inf") if self.end_epoch is None else self.end_epoch
        return self.start_epoch <= self._epoch < end

    def _set(self, factor: float) -> None:
        optimizer = self.model.optimizer
        before, after = learning_rate(optimizer), self.initial_lr * factor
        if after == before:
            return
        optimizer.learning_rate = after
        if self.momentum_correction and before > 0:
            scale_velocities(optimizer, after / before)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` over some epochs.

    ``initial_lr`` is the rate for all ranks together (one rank's times their number); with 0
    ``warmup_epochs`` it is the rate from the first batch on. See Goyal et al., "Accurate, Large
    Minibatch SGD", 2017.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if not number(warmup_epochs, "warmup_epochs") >= 0:
            raise ValueError(f"warmup_epochs must be at least 0, got {warmup_epochs}")

        def warmup(epoch: float) -> float:
            assert self.steps_per_epoch
            # One batch on, so that the last one reaches the full rate.
            epoch += 1.0 / self.steps_per_epoch
            size = current().size
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        factor: Any = warmup if warmup_epochs else 1.0
        last = warmup_epochs or 1
        super().__init__(initial_lr, factor, 0, last, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Say that the warm-up is over, once and if asked to."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch and epoch == self.end_epoch - 1 and self.verbose and not current().rank:
            rate = learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: learning rate warmed up to {rate}.")


class BestModelCheckpoint(KerasCallback, keras.callbacks.ModelCheckpoint):
    """Save the best model so far, on rank 0 alone; put it behind MetricAverageCallback.

    ``filepath``, which may be set later as an attribute too, comes last, as Horovod has none.
    Raises ValueError for a file in the place of the metric's name.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = "best.keras",
        **kwargs: Any,
    ) -> None:
        if str(monitor).endswith((".keras", ".h5")):
            raise ValueError(f"monitor is a metric, not a file: pass filepath={str(monitor)!r}")
        kwargs |= {"save_best_only": True, "mode": mode, "save_freq": save_freq}
        super().__init__(filepath, monitor, verbose, **kwargs)

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if current().rank == 0:
            super()._save_model(epoch, batch, logs)


class CompressorStateCheckpoint(KerasCallback):
    """Save what compressors remember after every epoch, each rank to a file of its own.

    The file is ``filepath`` with ``.rank0of2`` and so on behind it. With ``restore`` it is read at
    the start of ``fit`` where all ranks find theirs; in an elastic job only before the first step,
    for KerasState keeps what there is. Rank 0 warns where none does, and there are residuals of
    other ranks, or of another number of ranks.
    """

    def __init__(self, filepath: Any, restore: bool = True) -> None:
        super().__init__()
        self.filepath, self.restore = filepath, restore

    def on_train_begin(self, logs: Any = None) -> None:
        """Read this rank's file, if every rank has one."""
        if not self.restore:
            return
        found = Path(state_path(self.filepath)).exists()
        kept = is_elastic() and reducer_of(self.model.optimizer).step > 0
        share, keeps = averaged([float(found), float(kept)], "compressor state found")
        if keeps > 0:
            return
        if share == 1.0:
            load_compressor_state(self.model.optimizer, self.filepath)
        elif share > 0:
            warnings.warn(
                f"only some ranks find their compressor state at {self.filepath}: all start anew",
                stacklevel=2,
            )
        else:
            self._warn_of_other_ranks()

    def _warn_of_other_ranks(self) -> None:
        """Warn on rank 0 of residuals that any rank finds, for folders may be of one host."""
        gathered = allgather_object(residuals_beside(self.filepath))
        others = dict.fromkeys(whose for found in gathered for whose in found)
        runtime = current()
        if others and runtime.rank == 0:
            warn_of_other_ranks(str(self.filepath), [*others], runtime.size)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write this rank's file."""
        save_compressor_state(self.model.optimizer, self.filepath)
