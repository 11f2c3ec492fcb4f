"""Functions that make replicas start alike, and objects between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ringlet.job import objects
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.shared.model_agreement import common_names, equal_on_all_ranks, unique
from ringlet.shared.variable_names import assignable, name_of
from ringlet.tensorflow.ops.bridge import as_written, in_graph, operation_name, refuse_graph, run
from ringlet.tensorflow.ops.movements import broadcast_all
from ringlet.tensorflow.ops.tensors import dense


@as_written
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables on every rank with those of ``root_rank``, in one exchange.

    Takes ``tf.Variable`` and Keras variables; in a graph, returns the operation that does it.
    ``inplace`` is accepted for Horovod's sake. Raises Mismatch, the same on every rank, when
    names, shapes or dtypes differ, and TypeError for what is no list of variables. A Sequential
    model may have been loaded on one rank, and built on others.
    """
    listed = assignable(variables)
    names = unique([name_of(variable, i) for i, variable in enumerate(listed)])
    values = [dense(v, f"variable {n!r}") for v, n in zip(listed, names, strict=True)]
    items = [(n, f"{v.dtype.name}{v.shape.as_list()}") for n, v in zip(names, values, strict=True)]

    agreed = list(names)

    def check(_: Any) -> list[Any]:
        what = "broadcast_variables"
        agreed[:] = common_names(what, what, items, process_set)
        return []

    run_check = run(check, [], [])
    if not listed:
        return run_check[0] if in_graph() else None
    labels = [partial(lambda i: f"broadcast_variables.{agreed[i]}", i) for i in range(len(names))]
    with tf.control_dependencies(run_check):
        received = broadcast_all(values, root_rank, labels, process_set)
    made = [variable.assign(value) for variable, value in zip(listed, received, strict=True)]
    return tf.group(*[each for each in made if each is not None]) if in_graph() else None


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that broadcasts all variables of a ``tf.compat.v1`` graph.

    Raises RuntimeError in eager mode, which has no list of all variables.
    """
    if not in_graph():
        raise RuntimeError(
            "broadcast_global_variables needs a tf.compat.v1 graph; in eager mode use "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@as_written
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s ``obj`` on every rank of the process set.

    Pickled and signed. ``session`` is accepted for Horovod's sake. RuntimeError in a tf.function.
    """
    if tf.inside_function():
        refuse_graph("broadcast_object", "call it outside and pass what it returns as an argument")
    named = operation_name("broadcast_object", name, None, process_set.number())
    return objects.broadcast_object(obj, root_rank, named(), process_set)


@as_written
def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts the object it is given. See ``broadcast_object``."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@as_written
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return every rank's ``obj``, in rank order. See ``broadcast_object``."""
    if tf.inside_function():
        refuse_graph("allgather_object", "call it outside and pass what it returns as an argument")
    named = operation_name("allgather_object", name, None, process_set.number())
    return objects.allgather_object(obj, named(), process_set)


@as_written
def replicas_equal(variables: Sequence[Any]) -> bool:
    """Whether variables are bit-equal on all ranks. Collective, the same answer on every rank.

    Raises TypeError for something else, such as the model.
    """
    refuse_graph("replicas_equal", "call it outside")
    if not isinstance(variables, Iterable):
        raise TypeError(f"pass a list of variables, such as model.weights, not {variables!r}")
    arrays = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return equal_on_all_ranks((f"{array.dtype}{array.shape}", array) for array in arrays)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcast all variables from ``root_rank`` once a session has initialised them.

    ``device`` is accepted for Horovod's sake.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph, if that is a new one."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            self._operation = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self._operation)
