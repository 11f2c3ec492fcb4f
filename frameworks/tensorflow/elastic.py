"""Horovod's elastic interface for TensorFlow: training goes on when ranks are lost, or come.

What fails in a ``tf.function`` or a session is a HorovodInternalError where it is called (see
``graph_errors``), so that ``run`` goes back to the last commit after that as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringlet.job.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from ringlet.keras.elastic import KerasState
from ringlet.ring.dtypes import Array
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.loop_reducers import Commit, owed_norm, reducers_of
from ringlet.tensorflow.functions import broadcast_variables
from ringlet.tensorflow.ops.bridge import in_graph
from ringlet.tensorflow.optimizer import forget_passes, reducers_of_v1

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


class TensorFlowKerasState(KerasState):
    """A Keras model and its optimizer; ``backend`` is accepted for Horovod's sake.

    See ``ringlet.keras.elastic.KerasState``.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """Variables and, as ``kwargs``, anything else, which become attributes.

    In a ``tf.compat.v1`` graph ``variables`` are by default all of its global ones, and are read
    and written by ``session`` (by default the one that is entered), which has to have initialised
    them. In eager mode there is no list of all variables, and no session. Raises ValueError where
    there are no variables, or no session in a graph.

    What tapes and optimizers of ``tf.compat.v1`` hold back for the variables is saved and restored
    with them. A DistributedOptimizer of Keras needs a TensorFlowKerasState: this does not know it.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if variables is None:
            variables = tf.compat.v1.global_variables() if in_graph() else []
        self.variables = list(variables)
        if not self.variables:
            raise ValueError("there are no variables to keep: pass variables=model.variables")
        self.session = None
        if in_graph():
            self.session = session or tf.compat.v1.get_default_session()
            if self.session is None:
                raise ValueError("in a tf.compat.v1 graph a state needs a session: pass session=")
            # Made once: operations that are added later make a graph grow.
            self._broadcast_all = broadcast_variables(self.variables, 0)
            holders = [tf.compat.v1.placeholder(v.dtype.base_dtype) for v in self.variables]
            pairs = zip(self.variables, holders, strict=True)
            self._holders, self._assign = holders, tf.group(*[v.assign(h) for v, h in pairs])
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep copies of variables and objects."""
        self._arrays: list[Array] = (
            [variable.numpy().copy() for variable in self.variables]
            if self.session is None
            else self.session.run(self.variables)
        )
        self._remembered = Commit(self._reducers())
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last; passes of optimizers since their last step begin anew."""
        forget_passes(self.variables)
        if self.session is None:
            for variable, array in zip(self.variables, self._arrays, strict=True):
                variable.assign(array)
        else:
            fed = dict(zip(self._holders, self._arrays, strict=True))
            self.session.run(self._assign, fed)
        self._remembered.restore(self._reducers())
        super().restore()

    def held_back(self) -> float | None:
        """Return the norm of what compression holds back on this rank alone."""
        return owed_norm(self._reducers())

    def keep_steps(self) -> None:
        """Raise TypeError: a step may have changed variables before it fails."""
        raise self._only_to_commits()

    def sync(self) -> None:
        """Take over rank 0's variables and objects, and save them. Collective.

        Of ``backward_passes_per_step`` of an optimizer of ``tf.compat.v1`` the first one follows.
        """
        forget_passes(self.variables)
        if self.session is None:
            broadcast_variables(self.variables, 0)
        else:
            self.session.run(self._broadcast_all)
        super().sync()

    def forget_held(self) -> bool:
        """Forget what compressors remember, of tapes and of optimizers in a graph."""
        held = [reducer.memory.forget() for reducer in self._reducers()]
        return any(held)

    def _reducers(self) -> list[GradientReducer]:
        """Return what reduces gradients of the variables: for tapes, and optimizers in a graph."""
        return [*reducers_of(self.variables), *reducers_of_v1(self.variables)]
