"""What fails in a graph's node, raised where the graph was called, in a class of its own.

TensorFlow carries a code and a text out of a graph, not an exception: whatever a Python node raises
comes out as ``tf.errors.UnknownError`` (or InvalidArgumentError, if it was a ValueError). So nodes
put down what they raised, and the two methods by which TensorFlow runs a ``tf.function`` and a
session's graph are wrapped: they look there for what failed. Errors of others pass unchanged.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from ringlet.ring.errors import RingError, again
from ringlet.tensorflow.errors import TensorError, class_for

Called = TypeVar("Called", bound=Callable[..., Any])

_lock = threading.Lock()
_failed: deque[RingError] = deque(maxlen=32)  # a graph may be given up after several nodes failed


def remembered(node: Called) -> Called:
    """Decorate a node's function, so that its RingErrors come out of the graph as what they are."""
    _replace()

    @functools.wraps(node)
    def call(*args: Any) -> Any:
        try:
            return node(*args)
        except RingError as error:
            with _lock:
                _failed.append(_bare(error))
            raise

    return call  # type: ignore[return-value]


def _bare(error: RingError) -> RingError:
    """Return a copy of ``error`` without frames, which would keep the node's arrays alive."""
    copy = again(error).with_traceback(None)
    copy.__cause__ = copy.__context__ = None
    return copy


def own(error: Any) -> Any:
    """Return the node's error that TensorFlow's ``error`` tells of; ``error`` where there is none.

    It is an ``error`` of TensorFlow's still, with the same text.
    """
    if isinstance(error, TensorError) or not isinstance(error, tf.errors.OpError):
        return error
    with _lock:
        for failed in _failed:
            if str(failed) and str(failed) in error.message:
                _failed.remove(failed)
                break
        else:
            return error
    kind = class_for(failed, type(error))
    made = kind.__new__(kind, error.message)
    made.__dict__.update(vars(failed))
    kind.__init__(made, error.node_def, error.op, error.message)
    return made


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
