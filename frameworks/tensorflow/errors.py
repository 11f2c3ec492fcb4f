"""Errors that are TensorFlow's own classes too, for those who catch what Horovod raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from ringlet.process_sets import InvalidArgument
from ringlet.ring.errors import Mismatch

Called = TypeVar("Called", bound=Callable[..., Any])


class TensorMismatch(Mismatch, tf.errors.FailedPreconditionError):
    """Ranks asked for different things: a Mismatch that is a FailedPreconditionError."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class TensorArgument(InvalidArgument, tf.errors.InvalidArgumentError):
    """An argument that cannot be: an InvalidArgument that is an InvalidArgumentError."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def translated(function: Called) -> Called:
    """Decorate an entry point, so that its errors can be caught by TensorFlow's classes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Mismatch, InvalidArgument) as error:
            if isinstance(error, tf.errors.OpError):
                raise
            kind = TensorMismatch if isinstance(error, Mismatch) else TensorArgument
            raise kind(str(error)) from error

    return call  # type: ignore[return-value]
