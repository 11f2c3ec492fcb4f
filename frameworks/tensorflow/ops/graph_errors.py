"""What fails in a graph's node, raised where the graph was called, in a class of its own.

TensorFlow carries a code and a text out of a graph, not an exception: whatever a Python node raises
comes out as ``tf.errors.UnknownError`` (or InvalidArgumentError, if it was a ValueError). So nodes
put down what they raised, and the two methods by which TensorFlow runs a ``tf.function`` and a
session's graph are wrapped: they look there for what failed. Errors of others pass unchanged.

TensorFlow's text tells first, in some sixty lines, where the node was traced, and last what failed.
Here what failed comes first, and then where, by those lines that are the program's own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import keras
import tensorflow as tf

import ringlet
import ringlet.ring
from ringlet.ring.errors import RingError, again
from ringlet.tensorflow.ops.error_classes import TensorError, class_for

Called = TypeVar("Called", bound=Callable[..., Any])

_lock = threading.Lock()
# What nodes raised, and which did: a graph may be given up after several have failed.
_failed: deque[tuple[Exception, Node]] = deque(maxlen=32)

_HERE = [Path(str(module.__file__)).parent for module in (tf, keras, ringlet, ringlet.ring)]
_INSIDE = ("<", *(f"{folder}{os.sep}" for folder in (*_HERE, Path(__file__).parents[2])))
_MOST = 8  # lines of the program that are shown


class Node:
    """A node's ``function``, whose errors come out of the graph as what they are.

    ``operation`` is to be the graph's, once that is made.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        _replace()
        self._function = function
        self.operation: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        try:
            return self._function(*args)
        except Exception as error:
            with _lock:
                _failed.append((_bare(error), self))
            raise

    def traced(self) -> list[str]:
        """Return the program's lines that led to the tracing of the node, the innermost last."""
        if self.operation is None:
            return []
        frames = [f for f in self.operation.traceback if not f.filename.startswith(_INSIDE)]
        return [f'  File "{f.filename}", line {f.lineno}, in {f.name}' for f in frames[-_MOST:]]


def _bare(error: Exception) -> Exception:
    """Return a copy of ``error`` without frames, which would keep the node's arrays alive."""
    copy = again(error).with_traceback(None)
    copy.__cause__ = copy.__context__ = None
    return copy


def own(error: Any) -> Any:
    """Return the node's error that TensorFlow's ``error`` tells of; ``error`` where there is none.

    It is an ``error`` of TensorFlow's still, of the same class where the node's was no RingError.
    """
    if isinstance(error, TensorError) or not isinstance(error, tf.errors.OpError):
        return error
    with _lock:
        for failed, node in _failed:
            if str(failed) and str(failed) in error.message:
                _failed.remove((failed, node))
                break
        else:
            return error
    if not isinstance(failed, RingError):
        message = _located(f"{type(failed).__name__}: {failed}", node)
        return type(error)(error.node_def, error.op, message)
    message = _located(str(failed), node)
    kind = class_for(failed, type(error))
    made = kind.__new__(kind, message)
    made.__dict__.update(vars(failed))
    kind.__init__(made, error.node_def, error.op, message)
    return made


def _located(cause: str, node: Node) -> str:
    lines = node.traced()
    return "\n".join([cause, "", "In a graph, traced at:", *lines] if lines else [cause])


@functools.cache
def _replace() -> None:
    from tensorflow.python.client.session import BaseSession
    from tensorflow.python.eager.context import Context

    Context.call_function = _owning(Context.call_function)
    BaseSession._do_call = _owning(BaseSession._do_call)


def _owning(call: Called) -> Called:
    @functools.wraps(call)
    def owning(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except tf.errors.OpError as error:
            found = own(error)
            if found is error:
                raise
            raise found.with_traceback(error.__traceback__) from None

    return owning  # type: ignore[return-value]
