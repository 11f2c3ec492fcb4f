"""1-bit Adam: Adam whose second moment is frozen after a while, so that momentum can be compressed.

Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
speed", ICML 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringlet.compressors.routes import Routes, Spec
from ringlet.ring.communicator import ReduceOp
from ringlet.torch.naming import Named
from ringlet.torch.reducer import Reducer


class OneBitAdam(torch.optim.Optimizer):
    """Adam on averaged gradients for ``warmup`` steps; then on compressed averaged momentum.

    In the second phase every rank folds its own gradient into the common momentum, ranks average
    the results in ``compression`` with error feedback, and the step divides by the second moment
    of the end of the warm-up. The paper warms up for 15 to 25 % of all steps, until the second
    moment hardly changes. Reduces by itself: do not wrap it in DistributedOptimizer.

    Raises ValueError for settings out of range; what DistributedOptimizer raises otherwise.
    """

    def __init__(
        self,
        named_parameters: Named,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        warmup: int = 100,
        compression: Spec | Routes = "onebit | ef",
    ) -> None:
        if not (lr > 0 and eps > 0 and 0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"lr and eps must be > 0, betas in [0, 1); got {lr}, {eps}, {betas}")
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1 step, got {warmup}")
        named = {name: p for name, p in named_parameters if p.requires_grad}
        super().__init__(list(named.values()), {"lr": lr, "betas": betas, "eps": eps})
        self.warmup, self.steps = warmup, 0
        self._names = {p: name for name, p in named.items()}
        self._compression = compression
        # What is reduced travels as the gradient of a stand-in: a gradient first, momentum later.
        self._carriers = {n: torch.nn.Parameter(torch.zeros_like(p)) for n, p in named.items()}
        self._reducer = Reducer(self._carriers, "none", 1, ReduceOp.AVERAGE, 1.0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; with a ``closure``, evaluate it once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.steps == self.warmup:
            self._reducer.set_compression(self._compression)
        self.steps += 1
        frozen = self.steps > self.warmup
        with torch.no_grad():
            for group, p in self._each():
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                if frozen:
                    momentum = self.state[p]["exp_avg"]
                    gradient = momentum.lerp(gradient, 1 - group["betas"][0])
                self._carriers[self._names[p]].grad = gradient.clone()
            self._reducer.synchronize([])
            for group, p in self._each():
                self._update(group, p, self._carriers[self._names[p]].grad, frozen)
        return loss

    def _each(self) -> list[tuple[dict[str, Any], torch.nn.Parameter]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _update(
        self, group: dict[str, Any], p: torch.Tensor, reduced: torch.Tensor | None, frozen: bool
    ) -> None:
        assert reduced is not None
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        if frozen:
            state["exp_avg"].copy_(reduced)
        else:
            state["exp_avg"].lerp_(reduced, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(reduced, reduced, value=1 - beta2)
        # The corrections of Adam for its start; the second one stops where the moment is frozen.
        first = 1 - beta1**self.steps
        second = 1 - beta2 ** min(self.steps, self.warmup)
        divisor = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / first)
