"""The order in which elements lie in memory: DDP's buckets keep it, and so do residuals.

A model may be saved in one memory format, such as channels_last, and go on in another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.states import reorder
from ringlet.ring.callers import outside

Order = tuple[int, ...]  # dimensions of more than one element, those with the largest stride first


class MemoryOrders:
    """The orders of a hook's gradients, by name, and of what was loaded and not used yet."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Order, Sequence[int]]] = {}  # with the shapes
        self._loaded: dict[str, Any] = {}

    def saved(self) -> dict[str, Any]:
        """Return for a checkpoint the orders that are not those of contiguous tensors."""
        odd = {n: list(known) for n, (known, _) in self._known.items() if known != _usual(known)}
        return odd | {name: order for name, order in self._loaded.items() if order is not None}

    def load(self, names: Iterable[str], saved: Mapping[str, Any]) -> list[str]:
        """Note in which orders tensors were ``saved``; return those to ``settle`` now."""
        orders = saved if isinstance(saved, Mapping) else {}  # a file may hold anything
        loaded = {name: orders.get(name) for name in names}
        self._loaded |= loaded
        return [name for name in loaded if name in self._known]

    def rename(self, before: str, name: str | None) -> None:
        """Call otherwise what was loaded and not used yet; with None, forget it."""
        if before in self._loaded:
            order = self._loaded.pop(before)
            self._loaded |= {} if name is None else {name: order}

    def see(self, name: str, p: torch.Tensor, shape: Sequence[int]) -> None:
        """Note how DDP lays out the gradient of ``p``, which travels in this ``shape``."""
        strides = list(p.stride())
        if torch.empty_like(p).stride() != p.stride():  # it overlaps, or has gaps
            strides = list(torch.empty(p.shape, device="meta").stride())
        strides += [0] * (len(shape) - p.dim())  # a complex number's two parts
        dims = [d for d, n in enumerate(shape) if n != 1]
        self._known[name] = tuple(sorted(dims, key=lambda d: -strides[d])), shape

    def settle(self, name: str, state: State, compressor: Compressor, size: int) -> None:
        """Bring what was loaded into a tensor's ``state`` into its order. Arrays are NumPy's.

        Warns of what cannot be, which is forgotten. Gradients are averaged over ``size`` ranks.
        """
        if name not in self._loaded:
            return
        loaded, (now, shape) = self._loaded.pop(name), self._known[name]
        then = [*_usual(now)] if loaded is None else loaded
        if then == [*now]:
            return
        index = np.empty(0, np.intp)  # fits nothing
        if isinstance(then, list) and sorted(map(repr, then)) == sorted(map(repr, now)):
            places = np.arange(math.prod(shape)).reshape([shape[d] for d in then])
            index = places.transpose([then.index(d) for d in now]).reshape(-1)
        if lost := reorder(state, compressor, index, size):
            warnings.warn(
                f"ddp_hook: {name!r} was saved in another memory format; {compressor} forgets "
                f"{lost} of it",
                stacklevel=outside(),
            )


def _usual(order: Order) -> Order:
    """Return the order of a contiguous tensor of the same dimensions."""
    return tuple(sorted(order))
