"""DistributedOptimizer for torch: hooks, the reducer, and what compressors remember."""

from ringlet.torch.optimizer.wrapper import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
