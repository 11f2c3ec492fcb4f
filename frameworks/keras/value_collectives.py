"""Collectives on values and variables of any backend, as Horovod's Keras modules name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ringlet.compressors.specs.routes import Spec
from ringlet.fusion import Request
from ringlet.fusion.requests.handle import wait_all
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.keras.backends import backend
from ringlet.keras.optimizer_state import as_array
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import DTYPES, flat
from ringlet.shared.model_agreement import common_names, equal_on_all_ranks, unique
from ringlet.shared.variable_names import assignable, name_of


@public
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Spec = None,
) -> Any:
    """Return ``value`` (a tensor, array or number) averaged over all ranks, or combined by ``op``.

    The result is a tensor of Keras's backend. See ``ringlet.tensorflow.allreduce``.
    """
    return _operation("allreduce")(
        keras.ops.convert_to_tensor(value),
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )


@public
def allgather(value: Any, name: str | None = None) -> Any:
    """Return every rank's ``value`` behind one another along the first dimension."""
    return _operation("allgather")(keras.ops.convert_to_tensor(value), name=name)


@public
def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank ``root_rank``'s ``value``."""
    return _operation("broadcast")(keras.ops.convert_to_tensor(value), root_rank, name=name)


@public
def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """Return this rank's rows of ``value`` combined over all ranks."""
    return _operation("reducescatter")(keras.ops.convert_to_tensor(value), name=name, op=op)


@public
def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that broadcasts all variables of a ``tf.compat.v1`` graph.

    Raises RuntimeError in eager mode, and on other backends, which have no list of all variables:
    use BroadcastGlobalVariablesCallback.
    """
    if backend() != "tensorflow":
        raise RuntimeError(
            "broadcast_global_variables needs a tf.compat.v1 graph; use "
            "callbacks.BroadcastGlobalVariablesCallback(root_rank)"
        )
    from ringlet.tensorflow.functions import broadcast_global_variables as of_tensorflow

    return of_tensorflow(root_rank)


@public
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite Keras variables on every rank with those of ``root_rank``, on any backend.

    Raises Mismatch, the same on every rank, when names, shapes or dtypes differ, and TypeError for
    what is no list of variables. A Sequential model may have been loaded on one rank, and built on
    others.
    """
    listed = assignable(variables)
    names = unique([name_of(variable, i) for i, variable in enumerate(listed)])
    arrays = [as_array(variable) for variable in listed]
    items = [(n, f"{a.dtype.name}{list(a.shape)}") for n, a in zip(names, arrays, strict=True)]
    label = "keras.broadcast_variables"
    names = common_names("broadcast_variables", label, items, process_set)
    broadcast_arrays(arrays, [f"{label}.{name}" for name in names], root_rank, process_set)
    for variable, array in zip(listed, arrays, strict=True):
        variable.assign(array)


def broadcast_arrays(
    arrays: Sequence[Array],
    names: Sequence[str],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite arrays on every rank with those of ``root_rank``."""
    root, number = process_set.rank_of(root_rank, "root_rank"), process_set.number()
    items = []
    for array, name in zip(arrays, names, strict=True):
        dtype = array.dtype.name
        travels = dtype if dtype in DTYPES else "uint8"  # seeds are of types that nobody adds up
        plain = flat(array) if dtype in DTYPES else array.reshape(-1).view(np.uint8)
        shape = array.shape if dtype in DTYPES else plain.shape
        request = Request(name, "broadcast", travels, shape, root=root, process_set=number)
        items.append((request, plain, None, None))
    wait_all(current().engine.submit_all(items))


def averaged(values: Sequence[float], name: str) -> list[float]:
    """Return numbers averaged over all ranks, in double precision."""
    array = np.array(values, np.float64)
    request = Request(name, "allreduce", "float64", array.shape, ReduceOp.AVERAGE)
    current().engine.submit(request, array, at_once=True).wait()
    return [float(value) for value in array]


def variables_equal(variables: Sequence[Any]) -> bool:
    """Whether variables are bit-equal on all ranks, whatever Keras runs on."""
    arrays = [as_array(variable) for variable in variables]
    return equal_on_all_ranks((f"{array.dtype}{array.shape}", array) for array in arrays)


def _operation(name: str) -> Any:
    """Return the operation of that name in the adapter of Keras's backend."""
    found = {"tensorflow": _of_tensorflow, "torch": _of_torch, "jax": _of_jax}[backend()]
    return found()[name]


def _of_tensorflow() -> dict[str, Any]:
    from ringlet.tensorflow.ops import movements, reducescatter, reductions

    return vars(movements) | vars(reducescatter) | vars(reductions)


def _of_jax() -> dict[str, Any]:
    from ringlet.jax.ops import movements, reducescatter, reductions

    return vars(movements) | vars(reducescatter) | vars(reductions)


def _of_torch() -> dict[str, Any]:
    from ringlet.torch.ops import movements, reducescatter, reductions

    return vars(movements) | vars(reducescatter) | vars(reductions)
