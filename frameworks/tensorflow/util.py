"""What Horovod's users import from ``horovod.tensorflow.util``, under the names it has there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow import executing_eagerly as _executing_eagerly

__all__ = ["_cache", "_executing_eagerly", "_make_subgraph", "refs_to_vars", "vars_to_refs"]


def vars_to_refs(variables: Any) -> Any:
    """Return what variables can be told apart by, in tuples where there were lists of them."""
    if isinstance(variables, list | tuple):
        return tuple(vars_to_refs(variable) for variable in variables)
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables that ``vars_to_refs`` was given, in lists."""
    if isinstance(refs, list | tuple):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()


def _make_subgraph(function: Callable[..., Any]) -> Any:
    return tf.function(function)


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function, so that it runs once for equal arguments; lists are told by content."""
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        key = _fixed(args), tuple(sorted((name, _fixed(value)) for name, value in kwargs.items()))
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    return call


def _fixed(value: Any) -> Any:
    return (
        tuple(map(_fixed, value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )
