"""Functions that make replicas start alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxnet import gluon

from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.mxnet.nd_views import refuse_devices, view
from ringlet.ring.callers import public
from ringlet.shared.array_operations import broadcast_flat
from ringlet.shared.arrays import flat
from ringlet.shared.model_agreement import common_names, equal_on_all_ranks


@public
def broadcast_parameters(
    params: Mapping[str, Any],
    root_rank: int = 0,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters on every rank with those of ``root_rank``, in one exchange.

    ``params`` is what ``Block.collect_params()`` returns, or a dict of NDArrays such as
    ``Module.get_params()`` has. Gluon's that wait for a first batch to know their shape are
    broadcast when they are made, which is then collective. ``prefix`` goes before the names. Raises
    Mismatch, the same on every rank, when names, shapes or dtypes differ; TypeError for no mapping;
    ValueError where a parameter is on several devices.
    """
    if not isinstance(params, Mapping | gluon.ParameterDict):
        raise TypeError(
            f"broadcast_parameters takes net.collect_params(), or a dict of NDArrays, not a "
            f"{type(params).__name__}"
        )
    tensors: dict[str, Any] = {}
    for name, param in sorted(params.items()):
        label = f"{prefix or ''}{name}"
        if not isinstance(param, gluon.Parameter):
            tensors[label] = param
            continue
        try:
            made = param.list_data()
        except gluon.parameter.DeferredInitializationError:
            made = []
        refuse_devices(param, f"parameter {label!r}")
        if made:
            tensors[label] = made[0]
        else:
            _broadcast_when_made(param, label, root_rank, process_set)
    _overwrite(tensors, root_rank, process_set)


@public
def replicas_equal(params: Mapping[str, Any]) -> bool:
    """Whether parameters are bit-equal on all ranks. Collective, the same answer on every rank."""
    arrays = [
        (name, view(param.data() if isinstance(param, gluon.Parameter) else param))
        for name, param in sorted(params.items())
    ]
    return equal_on_all_ranks((f"{name} {a.dtype}{a.shape}", a) for name, a in arrays)


def _overwrite(tensors: Mapping[str, Any], root_rank: int, process_set: ProcessSet) -> None:
    arrays = {name: view(tensor, f"parameter {name!r}") for name, tensor in tensors.items()}
    items = [(name, f"{array.dtype.name}{list(array.shape)}") for name, array in arrays.items()]
    what = "broadcast_parameters"
    names = common_names(what, f"mxnet.{what}", items, process_set)
    if not arrays:
        return
    every = list(arrays.values())
    broadcast_flat(
        [f"mxnet.{what}.{name}" for name in names],
        [array.dtype.name for array in every],
        [array.shape for array in every],
        [flat(array) for array in every],
        root_rank,
        process_set,
    )


def _broadcast_when_made(param: Any, name: str, root_rank: int, process_set: ProcessSet) -> None:
    inner = param._init_impl

    def made(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        _overwrite({name: param.data()}, root_rank, process_set)

    param._init_impl = made
