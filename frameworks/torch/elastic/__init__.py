"""Horovod's elastic interface for PyTorch: training goes on when ranks are lost, or come."""

from ringlet.job.elastic import ObjectState, State, run
from ringlet.torch.elastic.sampler import ElasticSampler
from ringlet.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
