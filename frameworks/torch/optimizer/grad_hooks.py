"""Hooks on parameters that tell a reducer when a gradient is complete.

Parameters belong to the newest reducer that names them: an older one gives all of its hooks up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringlet.torch.ops.entry_points import untraced

Ready = Callable[[Any, str, torch.Tensor], None]  # owner, name, parameter

_live: weakref.WeakSet[GradHooks] = weakref.WeakSet()
_live_lock = threading.Lock()


class GradHooks:
    """The hooks of one ``owner``, which they do not keep alive: parameters outlive optimizers.

    They call ``ready(owner, name, parameter)`` whenever a gradient of ``named`` was accumulated,
    unless ``retired``: then a newer owner has some of the parameters.
    """

    def __init__(
        self, owner: object, named: Mapping[str, torch.nn.Parameter], ready: Ready
    ) -> None:
        self.retired = False
        self._owner = weakref.ref(owner)
        self._ids = {id(p) for p in named.values()}
        self._hooks: list[Any] = []
        weakref.finalize(owner, _remove, self._hooks)
        self._take_over()
        for name, p in named.items():
            register: Any = p.register_post_accumulate_grad_hook
            self._hooks.append(register(_hook(self._owner, ready, name)))

    def __contains__(self, p: object) -> bool:
        return id(p) in self._ids

    def _take_over(self) -> None:
        """Let other owners of the same parameters retire."""
        with _live_lock:
            for other in list(_live):
                if other._owner() is not None and not self._ids.isdisjoint(other._ids):
                    other.retired = True
                    _remove(other._hooks)
            _live.add(self)


def _hook(owner: weakref.ref[Any], ready: Ready, name: str) -> Callable[[torch.Tensor], None]:
    @untraced
    def accumulated(p: torch.Tensor) -> None:
        alive = owner()
        if alive is not None:
            ready(alive, name, p)

    return accumulated


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
