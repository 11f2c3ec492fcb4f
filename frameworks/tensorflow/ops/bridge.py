"""From tensors to the engine and back: at once in eager mode, as one graph node in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ringlet.job.session import current
from ringlet.ring.dtypes import Array
from ringlet.tensorflow.ops import overlap
from ringlet.tensorflow.ops.error_classes import translated
from ringlet.tensorflow.ops.graph_errors import Node
from ringlet.tensorflow.ops.overlap import Begin
from ringlet.tensorflow.ops.tensors import to_array, to_tensor

Function = Callable[[list[Array]], Sequence[Array]]
Called = TypeVar("Called", bound=Callable[..., Any])
Output = tuple[str, Any]  # dtype by name; a shape, in which None is unknown, or None


def run(function: Function, tensors: Sequence[Any], outputs: Sequence[Output]) -> list[Any]:
    """Return ``function(arrays of tensors)`` as tensors of the given dtypes and static shapes.

    In a graph the call is one stateful node, however many tensors there are. It occupies a thread
    of TensorFlow's until it is done; ``tf.function`` runs such nodes one after the other, in the
    order in which they were traced, so no two of them can wait for each other's thread. For plain
    graphs, which have no order, see ``_called_in_plain_graph``.
    """
    current()
    if tf.executing_eagerly():
        arrays = function([to_array(tensor) for tensor in tensors])
        return [to_tensor(a, dtype) for a, (dtype, _) in zip(arrays, outputs, strict=True)]
    refuse_compilation()

    node = Node(lambda *arrays: list(function(list(arrays))))
    kinds = [tf.as_dtype(dtype) for dtype, _ in outputs]
    made: Any
    if not in_plain_graph():
        made = tf.numpy_function(node, list(tensors), kinds, stateful=True)
    elif outputs:
        made = _called_in_plain_graph(node, tensors, kinds)
    else:
        (made,) = _called_in_plain_graph(lambda *a: [*node(*a), np.array(True)], tensors, [tf.bool])
    results: list[Any] = list(made) if outputs else [made]
    node.operation = results[0] if isinstance(results[0], tf.Operation) else results[0].op
    for tensor, (_, shape) in zip(results, outputs, strict=False):
        tensor.set_shape(shape)
    return results


def _called_in_plain_graph(
    function: Callable[..., list[Array]], tensors: Sequence[Any], kinds: Sequence[Any]
) -> Any:
    """Return ``function(*tensors)`` as a list of tensors of the dtypes ``kinds``, at least one.

    A ``tf.compat.v1`` graph runs its nodes in any order, a different one on every rank. Were each
    to keep a thread until its peers answer, a few of them would block all others, on every rank
    different ones. So the call is a data set of one element: an iterator's node waits without a
    thread, and the call has one of its own.
    """

    def inside(*given: Any) -> tuple[Any, ...]:
        made = tf.numpy_function(function, given if tensors else [], list(kinds))
        return tuple(made) if isinstance(made, list | tuple) else (made,)

    data = tf.data.Dataset.from_tensors(tuple(tensors) or 0).map(inside)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    variant = data.with_options(options)._variant_tensor
    kind = {"output_types": list(kinds), "output_shapes": [tf.TensorShape(None)] * len(kinds)}
    iterator = tf.raw_ops.AnonymousIteratorV3(**kind)
    made = tf.raw_ops.MakeIterator(dataset=variant, iterator=iterator)
    with tf.control_dependencies([made]):
        return tf.raw_ops.IteratorGetNext(iterator=iterator, **kind)


def begin(start: Begin, tensors: Sequence[Any], outputs: Sequence[Output]) -> list[Any]:
    """Return what ``run`` would for ``start(arrays)()``, which begins, and then waits.

    Such operations of one ``tf.function`` are under way together. There is at least one output.
    """
    if tf.executing_eagerly() or not overlap.possible():
        return run(lambda arrays: start(arrays)(), tensors, outputs)
    current()
    refuse_compilation()
    results = overlap.overlapped(start, tensors, [tf.as_dtype(dtype) for dtype, _ in outputs])
    for tensor, (_, shape) in zip(results, outputs, strict=True):
        tensor.set_shape(shape)
    return results


def as_written(function: Called) -> Called:
    """Decorate an entry point: its errors are TensorFlow's too, and AutoGraph leaves it alone."""
    result: Called = tf.autograph.experimental.do_not_convert(translated(function))
    return result


def in_graph() -> bool:
    """Whether operations are recorded rather than run."""
    return not tf.executing_eagerly()


def in_plain_graph() -> bool:
    """Whether they are recorded into a ``tf.compat.v1`` graph, outside any ``tf.function``."""
    return in_graph() and not tf.inside_function()


Name = str | Callable[[], str] | None


def operation_name(kind: str, name: Name, tensor: Any, process_set: int) -> Callable[[], str]:
    """Return what tells an operation's name, at the time it runs.

    Without a name it is a number, counted in the order in which operations run; in a plain graph,
    where they run in any order, the tensor's name.
    """
    if callable(name):
        return name
    if name is not None:
        return lambda: name
    if in_plain_graph() and tensor is not None:
        fixed = f"{kind}.{tensor.name}"
        return lambda: fixed
    kind = kind if process_set == 0 else f"{kind}.{process_set}"
    return lambda: current().unnamed(f"tensorflow.{kind}")


def refuse_graph(what: str, instead: str) -> None:
    """Raise RuntimeError inside a graph, where ``what`` would run once, at tracing."""
    if in_graph():
        raise RuntimeError(
            f"{what} inside a tf.function or graph would run once, while it is traced, and never "
            f"again; {instead}"
        )


def refuse_compilation() -> None:
    """Raise RuntimeError while XLA compiles: it cannot call out of what it has compiled."""
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "communication inside a function compiled by XLA: jit_compile=True cannot contain it. "
            "Pass jit_compile=False to model.compile(...) or tf.function; to compile the rest, "
            "compute gradients in a function of its own with jit_compile=True, and reduce and "
            "apply them outside it"
        )
