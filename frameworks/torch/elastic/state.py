"""Models, optimizers and whatever belongs to them, as one state to commit and to go back to."""

from __future__ import annotations

from typing import Any

import torch

from ringlet.job.elastic import ObjectState
from ringlet.torch.functions import broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """A model, an optimizer and, as ``kwargs``, anything else; all of them become attributes.

    Models and optimizers travel as tensors; samplers, schedulers and the like by their
    ``state_dict``, other objects as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def sync(self) -> None:
        """Take over rank 0's state, and save it. Collective."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
        super().sync()

    def _plain(self) -> list[str]:
        tensors = torch.nn.Module, torch.optim.Optimizer
        return [name for name in self._names if not isinstance(getattr(self, name), tensors)]
