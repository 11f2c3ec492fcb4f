"""DistributedOptimizer for torch: its hooks, what reduces gradients step by step, and checks."""

from ringlet.torch.optimizer.wrapper import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
