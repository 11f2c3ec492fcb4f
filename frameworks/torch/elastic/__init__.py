"""Horovod's elastic interface for PyTorch, for jobs that keep the ranks they began with."""

from ringlet.job.elastic import ObjectState, State, run
from ringlet.torch.elastic.sampler import ElasticSampler
from ringlet.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
