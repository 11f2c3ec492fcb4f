"""What optimizers do where a GradScaler looks at their gradients, to unscale and to check them.

A GradScaler decides on each rank for itself whether a step is taken. Ranks decide alike if they
look at gradients that are reduced; an optimizer in whose step ranks meet has none to show.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from ringlet.job.session import current


def of_scaler(frame: FrameType) -> bool:
    """Whether a GradScaler, or a subclass of it, runs in ``frame``."""
    if "grad_scaler" in frame.f_globals.get("__name__", ""):  # which code of exec may lack
        return True
    return isinstance(frame.f_locals.get("self"), torch.amp.GradScaler)


def cycle_of(frame: FrameType) -> object:
    """Return what a GradScaler in ``frame`` keeps of optimizers until its ``update``, another then.

    None for what keeps nothing, or not where torch's does.
    """
    return getattr(frame.f_locals.get("self"), "_per_optimizer_states", None)


class RefusesScaler:
    """Part of an optimizer that reduces in ``step``: RuntimeError for a GradScaler, if not alone.

    It would skip the step on the ranks that overflowed, and the others would wait for them.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        if of_scaler(sys._getframe(1)) and current().size > 1:
            raise RuntimeError(
                f"a GradScaler does not go together with {self._scaler_meets}: ranks meet in "
                "step(), which it would skip on those alone whose gradients overflow. Train in "
                "bfloat16 (torch.autocast needs no scaler then), or with DistributedOptimizer and "
                "op=Average"
            )
        return self._shown_groups()

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups  # where torch's __setstate__ puts them too

    @property
    def _scaler_meets(self) -> str:
        """What to call this optimizer."""
        return type(self).__name__

    def _shown_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups
