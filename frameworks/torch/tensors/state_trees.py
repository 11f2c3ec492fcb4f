"""A ``state_dict`` as JSON and tensors, for ranks that do not unpickle what others send."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from ringlet.ring.dtypes import Array
from ringlet.torch.tensors.views import on_host

_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dissected(value: Any) -> tuple[Any, list[Array]]:
    """Return ``value`` as what JSON holds, and its tensors in order as flat arrays of bytes.

    It consists of dense tensors, numbers, strings, None, dtypes, and lists, tuples and dicts of
    such. Raises TypeError, naming the place, for anything else.
    """
    arrays: list[Array] = []
    return _taken_apart(value, "state", arrays), arrays


def is_tree(value: Any) -> bool:
    """Whether ``value``, out of JSON, is what ``dissected`` returns."""
    try:
        list(_tensors(value))
    except (LookupError, TypeError, ValueError, RecursionError):
        return False
    return True


def rooms(tree: Any) -> list[Array]:
    """Return arrays of bytes for the tensors of a tree, in order. Raises MemoryError."""
    sizes = [prod(shape) * dtype.itemsize for dtype, shape in _tensors(tree)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(sizes) > memory:
        raise MemoryError(f"tensors of {sum(sizes)} bytes, where this machine has {memory}")
    return [np.zeros(size, np.uint8) for size in sizes]


def assembled(tree: Any, arrays: Sequence[Array]) -> Any:
    """Return what was dissected, whose tensors have the bytes of ``arrays`` and share them."""
    return _put_together(tree, iter(arrays))


def _taken_apart(value: Any, place: str, arrays: list[Array]) -> Any:
    if isinstance(value, np.generic):  # such as a learning rate from NumPy
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        # Contiguous and of one dimension, or torch cannot view it as bytes.
        plain = on_host(value.data).reshape(-1).view(torch.uint8)
        arrays.append(plain.numpy())
        return {"tensor": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        items = [_taken_apart(v, f"{place}[{i}]", arrays) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, int | str):
                raise TypeError(f"{place} has the key {key!r}, which is no number and no string")
        pairs = [[k, _taken_apart(v, f"{place}[{k!r}]", arrays)] for k, v in value.items()]
        return {"dict": pairs}
    raise TypeError(f"{place} is {type(value).__name__}, which cannot travel")


def _put_together(tree: Any, arrays: Iterator[Array]) -> Any:
    if isinstance(tree, list):
        return [_put_together(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "tuple" in tree:
        return tuple(_put_together(item, arrays) for item in tree["tuple"])
    if "dict" in tree:
        return {key: _put_together(item, arrays) for key, item in tree["dict"]}
    if "dtype" in tree:
        return _DTYPES[tree["dtype"]]
    ((dtype, shape),) = _tensors(tree)
    array = next(arrays)
    if array.size == 0:  # which torch cannot view as another dtype
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(array).view(dtype).reshape(shape)


def _tensors(tree: Any) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Yield dtype and shape of every tensor. Raises what shows that this is no tree."""
    if isinstance(tree, list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        ((kind, value), *more) = tree.items()
        if kind == "tensor" and [key for key, _ in more] == ["shape"]:
            shape = tree["shape"]
            if not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{shape} is no shape")
            yield _DTYPES[value], shape
        elif kind == "dict" and not more:
            for key, item in value:
                if not isinstance(key, int | str):
                    raise ValueError(f"{key!r} is no key")
                yield from _tensors(item)
        elif kind == "tuple" and not more:
            yield from _tensors(list(value))
        elif kind != "dtype" or value not in _DTYPES:
            raise ValueError(f"{kind!r} is nothing known")
