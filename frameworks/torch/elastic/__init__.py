"""Horovod's elastic interface for PyTorch: training goes on when ranks are lost, or come."""

import torch

from ringlet.job import warm_up
from ringlet.job.elastic import ObjectState, State, run
from ringlet.torch.elastic.epoch_group import process_group
from ringlet.torch.elastic.sampler import ElasticSampler
from ringlet.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "process_group", "run"]


def _load() -> None:
    """Let torch load what it loads at the first optimizer, and at the first backward pass."""
    weight = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()  # type: ignore[no-untyped-call]


warm_up.loads.append(_load)
