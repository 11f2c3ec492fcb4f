"""Models, optimizers and whatever belongs to them, as one state to commit and to go back to."""

from __future__ import annotations

from typing import Any

import torch

from ringlet.job.elastic import ObjectState
from ringlet.job.topology import rank, size
from ringlet.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringlet.torch.optimizer.checkpoint import STATE_KEY
from ringlet.torch.optimizer.reducer import Reducer


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

    def restore(self) -> None:
        """Go back to what was saved last, by this process: under whichever rank it was then."""
        for content in self._saved.values():
            if isinstance(content, dict) and isinstance(kept := content.get(STATE_KEY), dict):
                kept.update(rank=rank(), size=size())
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's state, and save it. Collective."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
                if isinstance(reducer := getattr(value, "_ringlet", None), Reducer):
                    reducer.join_epoch()
        super().sync()

    def _plain(self) -> list[str]:
        tensors = torch.nn.Module, torch.optim.Optimizer
        return [name for name in self._names if not isinstance(getattr(self, name), tensors)]
