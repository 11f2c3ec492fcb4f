"""What optimizers do where a GradScaler looks at their gradients, to unscale and to check them.

A GradScaler decides on each rank for itself whether a step is taken. Ranks decide alike if they
look at gradients that are reduced; an optimizer in whose step ranks meet has none to show.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch

from ringlet.job.session import current

# In names of a GradScaler's functions that judge gradients, or act on what was found.
_JUDGES = ("unscale", "inf", "overflow", "finite", "step")


def of_scaler(frame: FrameType) -> bool:
    """Whether a GradScaler, or a subclass of it, looks at gradients in ``frame``.

    It may look at parameter groups for something else, such as a learning rate for a log, perhaps
    on one rank alone.
    """
    named = "grad_scaler" in frame.f_globals.get("__name__", "")  # which code of exec may lack
    if not (named or isinstance(frame.f_locals.get("self"), torch.amp.GradScaler)):
        return False
    return any(word in frame.f_code.co_name for word in _JUDGES) or _reads_gradients(frame.f_code)


def _reads_gradients(code: CodeType) -> bool:
    """Whether ``code``, or a function within, reads an attribute ``grad``."""
    return "grad" in code.co_names or any(
        isinstance(each, CodeType) and _reads_gradients(each) for each in code.co_consts
    )


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
