"""Horovod's elastic interface for Keras: models that go on when ranks are lost, or come."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from ringlet.job.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from ringlet.job.objects import allgather_object, broadcast_object
from ringlet.keras.callback_base import KerasCallback
from ringlet.keras.optimizer_state import (
    as_array,
    hold_variables,
    is_given_away,
    state_variables,
)
from ringlet.keras.reducing import Reducing
from ringlet.keras.value_collectives import broadcast_variables
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.loop_reducers import Commit, loop_reducers, owed_norm, reducers_of

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ObjectState):
    """A model, its optimizer and, as ``kwargs``, anything else; all of them become attributes.

    ``optimizer`` is by default the one that the model was compiled with. Weights and optimizer
    state travel as tensors, other objects pickled. What the compressors of a DistributedOptimizer
    remember, and of a DistributedGradientTape for the model's variables, is saved and restored,
    each rank's own, and not synchronised. Raises ValueError for a model without weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                f"model {model.name!r} has no weights yet: call model.build(input_shape) before "
                "its state is made"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep copies of weights, optimizer state, residuals and objects."""
        hold_variables(self.model)
        self._arrays = [as_array(variable) for variable in self._variables()]
        reducer = self._reducer()
        self._remembered = None if reducer is None else reducer.remembered()
        self._of_loops = Commit(self._loop_reducers())
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last; passes since the last step begin anew."""
        self._forget_passes()
        for variable, array in zip(self._variables(), self._arrays, strict=True):
            variable.assign(array)
        reducer = self._reducer()
        if reducer is not None:
            reducer.go_back(self._remembered)
        self._of_loops.restore(self._loop_reducers())
        super().restore()

    def holders(self) -> Sequence[GradientReducer]:
        """Return the optimizer's reducer, if it is one of ours."""
        reducer = self._reducer()
        return [] if reducer is None else [reducer]

    def held_back(self) -> float | None:
        """Return the norm of what compression holds back on this rank alone."""
        return owed_norm([*self.holders(), *self._loop_reducers()])

    def keep_steps(self) -> None:
        """Keep what compressors remember from before each step."""
        if (reducer := self._reducer()) is not None:
            reducer.memory.keep_steps()
        loop_reducers().keep_steps()

    def take_back(self) -> None:
        """Let compressors forget the step at hand; back to the commit where it took the weights.

        Keras's steps on the backend jax do: the weights' memory is given to them.
        """
        if any(is_given_away(variable) for variable in self._variables()):
            self.restore()
            return
        for reducer in (*self.holders(), *self._loop_reducers()):
            reducer.memory.take_back()

    def content(self) -> dict[str, Any]:
        """Return weights, optimizer state and objects, without what is each rank's own."""
        hold_variables(self.model)
        arrays = [as_array(variable) for variable in self._variables()]
        steps = [reducer.step for reducer in (*self.holders(), *self._loop_reducers())]
        return {"": [arrays, steps], **super().content()}

    def sync(self) -> None:
        """Take over rank 0's weights, optimizer state and objects, and save them. Collective.

        Of ``backward_passes_per_step`` the first one follows. Raises Mismatch, the same on every
        rank, where the ranks' models differ.
        """
        self._forget_passes()
        broadcast_variables(self._variables(), 0)
        reducer = self._reducer()
        if reducer is not None and is_elastic():  # schedules and shared random numbers follow
            step, counts = _steps_in_common(reducer)
            reducer.memory.align(counts)
            reducer.restart(step)
            reducer.enlist()  # before the state is saved: it is of these ranks then
        super().sync()

    def forget_held(self) -> bool:
        """Forget what compressors remember, of the optimizer and of tapes."""
        reducers = (*self.holders(), *self._loop_reducers())
        held = [reducer.memory.forget() for reducer in reducers]
        return any(held)

    def _forget_passes(self) -> None:
        """Let ranks add up gradients from the same pass on: newcomers have seen none."""
        if isinstance(self.optimizer, Reducing):
            self.optimizer.forget_passes()

    def _variables(self) -> list[Any]:
        if self.optimizer is None:
            return list(self.model.weights)
        own = self.model.trainable_variables
        return [*self.model.weights, *state_variables(self.optimizer, own)]

    def _loop_reducers(self) -> list[GradientReducer]:
        """Return what reduces gradients of the model for tapes of TensorFlow's."""
        return reducers_of(self.model.trainable_variables)

    def _reducer(self) -> GradientReducer | None:
        return getattr(self.optimizer, "_ringlet", None)


def _steps_in_common(reducer: GradientReducer) -> tuple[int, dict[str, int]]:
    """Return how many steps, and how many of each tensor, all ranks are to count. Collective.

    Those of rank 0, or the most where it takes no part: then it counts none.
    """
    told = [(reducer.step, reducer.memory.steps)]
    if 0 in (reducer.settings.process_set.ranks or [0]):
        told = broadcast_object(told, name="KerasState.steps")
    else:
        told = [each for (each,) in allgather_object(told, name="KerasState.steps")]
    return max(told, key=itemgetter(0))


class CommitStateCallback(KerasCallback):
    """Commit ``state`` after every ``batches_per_commit`` batches, and after every epoch.

    Put it behind the callbacks that update the state. A subclass can do more in ``commit``.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be at least 1, got {batches_per_commit}")
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from here, on all ranks alike."""
        self._batches = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch, and commit if it is time."""
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.commit()

    def commit(self) -> None:
        """Commit the state."""
        self.state.commit()


class UpdateBatchStateCallback(KerasCallback):
    """Keep the number of the last batch of the epoch, from 0, in ``state.batch``.

    It is 0 between epochs. ``fit`` begins epochs at their start: one that goes on within an epoch
    needs a ``steps_per_epoch`` and data of its own.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take over the batch's number."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Start anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(KerasCallback):
    """Count the epochs that are done in ``state.epoch``, on from what it is when ``fit`` begins."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the state once the first epoch ends."""
        self._before = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count; the first epoch of ``fit`` has the number ``initial_epoch``."""
        if self._before is None:
            self._before = self.state.epoch - epoch
        self.state.epoch = self._before + epoch + 1
