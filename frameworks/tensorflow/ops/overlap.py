"""Operations of a ``tf.function`` that are under way together: one node begins each, one waits.

The nodes that begin run one after the other, in the order in which they were traced, on all ranks;
those that wait run in any order. Whatever a thread of TensorFlow's waits for has been begun here,
and is begun on the other ranks before anything there waits that was begun here later. So some rank
can always go on, however few threads there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from ringlet.ring.dtypes import Array
from ringlet.tensorflow.ops.graph_errors import Node

Finish = Callable[[], Sequence[Array]]
Begin = Callable[[list[Array]], Finish]

_GIVEN_UP = 64  # runs of a node that may be under way; more were given up by TensorFlow


def possible() -> bool:
    """Whether nodes are being traced that run in order, once each time that a function is called.

    Not so in the branches and loops of a function, where a turn may begin before the last one ends.
    """
    return type(tf.compat.v1.get_default_graph()) is FuncGraph


def overlapped(begin: Begin, tensors: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """Return the results of ``begin(arrays of tensors)()`` as tensors of ``kinds``."""
    begun: dict[int, Finish] = {}
    numbers = itertools.count()

    def start(*arrays: Array) -> Any:
        number = next(numbers)
        begun[number] = begin(list(arrays))
        while len(begun) > _GIVEN_UP:
            begun.pop(next(iter(begun)), None)
        return np.int64(number)

    def end(number: Any) -> list[Array]:
        return list(begun.pop(int(number))())

    starts, ends = Node(start), Node(end)
    number = tf.numpy_function(starts, list(tensors), tf.int64, stateful=True)
    # Stateless, or it would hold up those that begin. It runs even if nobody wants the result.
    results: list[Any] = tf.numpy_function(ends, [number], list(kinds), stateful=False)
    starts.operation = ends.operation = results[0].op
    tf.compat.v1.get_default_graph().control_outputs.append(results[0].op)
    return results
