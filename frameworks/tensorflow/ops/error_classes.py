"""Errors that are TensorFlow's own classes too, for those who catch what Horovod raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from ringlet.job.process_sets import InvalidArgument
from ringlet.ring.callers import debugging, public
from ringlet.ring.errors import Mismatch, RingError

Called = TypeVar("Called", bound=Callable[..., Any])


class TensorError(RingError, tf.errors.OpError):
    """A RingError that is an error of TensorFlow's: base of the classes that ``both`` returns.

    Made from a message, or from TensorFlow's arguments (node, operation, message, ...), with which
    Keras and sessions make an error anew.
    """

    _kind: type[RingError]
    _of_tensorflow: type[Any]

    def __init__(self, *args: Any) -> None:
        node, operation, message = args[:3] if len(args) > 2 else (None, None, args[0])
        self._of_tensorflow.__init__(self, node, operation, message)

    def __reduce__(self) -> tuple[Any, ...]:
        told = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return _unpickled, (self._kind, self._of_tensorflow, self.message), told


_classes: dict[tuple[type, type], type[TensorError]] = {}


def both(kind: type[RingError], of_tensorflow: type[Any]) -> type[TensorError]:
    """Return the class of errors that are a ``kind`` and an ``of_tensorflow`` at once."""
    key = kind, of_tensorflow
    if key not in _classes:
        content = {"__doc__": kind.__doc__, "_kind": kind, "_of_tensorflow": of_tensorflow}
        made: Any = type(kind.__name__, (TensorError, kind, of_tensorflow), content)
        _classes.setdefault(key, made)  # another thread's may be there by now
    return _classes[key]


def _unpickled(kind: type[RingError], of_tensorflow: type[Any], message: str) -> TensorError:
    return both(kind, of_tensorflow)(message)


def class_for(error: RingError, otherwise: type[Any]) -> type[TensorError]:
    """Return the class in which Horovod's users expect ``error``; ``otherwise`` where any will do.

    ``tf.errors.FailedPreconditionError`` where ranks disagree, ``tf.errors.InvalidArgumentError``
    for an argument that cannot be.
    """
    if isinstance(error, Mismatch):
        return both(type(error), tf.errors.FailedPreconditionError)
    if isinstance(error, InvalidArgument):
        return both(type(error), tf.errors.InvalidArgumentError)
    return both(type(error), otherwise)


def translated(function: Called) -> Called:
    """Decorate an entry point, so that its errors can be caught by TensorFlow's classes.

    A mistake in a call has a short traceback, as ``public`` makes it.
    """
    known = public(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return known(*args, **kwargs)
            except (Mismatch, InvalidArgument) as error:
                if isinstance(error, tf.errors.OpError):
                    raise
                cause = error if debugging() else None
                raise class_for(error, tf.errors.UnknownError)(str(error)) from cause
        except Exception as error:
            _end_at_the_caller(error)
            raise

    return call  # type: ignore[return-value]


def _end_at_the_caller(error: Exception) -> None:
    """Take our frame off a traceback that has none but it: ``public`` has cut what was below."""
    own = error.__traceback__
    if own is not None and own.tb_next is None and not debugging():
        error.__traceback__ = None
