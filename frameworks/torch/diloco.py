"""DiLoCo: many local steps, then one outer step on the compressed average of what they changed.

Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023.
"""

from __future__ import annotations

from typing import Any

import torch

from ringlet.compressors.routes import Routes, Spec
from ringlet.torch.naming import Named
from ringlet.torch.optimizer import DistributedOptimizer


class DiLoCo:
    """Steps ``inner`` on each rank alone; every ``every`` steps ranks agree again.

    The outer step takes the average over ranks of (last agreed - own) parameters for a gradient
    and applies SGD with Nesterov momentum to the last agreed ones. With ``outer_lr=1`` and
    ``outer_momentum=0`` this is local SGD: plain averaging. Ranks must begin with the same
    parameters (``broadcast_parameters``) and take the same number of steps. Keeps one more copy of
    the parameters. Collective where it is made and every ``every`` steps.

    Raises ValueError for settings out of range; what DistributedOptimizer raises otherwise.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named_parameters: Named,
        every: int = 16,
        compression: Spec | Routes = "int8 | ef",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        if not (outer_lr > 0 and 0 <= outer_momentum < 1):
            raise ValueError(
                f"outer_lr must be > 0 and outer_momentum in [0, 1), got {outer_lr}, "
                f"{outer_momentum}"
            )
        self.inner, self.every, self.steps = inner, every, 0
        self._parameters = {n: p for n, p in named_parameters if p.requires_grad}
        self._agreed = {
            n: torch.nn.Parameter(p.detach().clone()) for n, p in self._parameters.items()
        }
        outer = torch.optim.SGD(
            self._agreed.values(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )
        self.outer = DistributedOptimizer(outer, self._agreed.items(), compression)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups, for schedulers."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def step(self) -> bool:
        """Take an inner step, and every ``every``-th time an outer one; return whether it did."""
        self.inner.step()
        self.steps += 1
        if self.steps % self.every:
            return False
        with torch.no_grad():
            for name, p in self._parameters.items():
                self._agreed[name].grad = self._agreed[name].detach() - p
            self.outer.step()
            for name, p in self._parameters.items():
                p.copy_(self._agreed[name])
        return True
