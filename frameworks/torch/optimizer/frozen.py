"""Parameters that were frozen in mid-training, which no reduction may move."""

from __future__ import annotations

import torch


def is_still(p: torch.Tensor) -> bool:
    """Whether ``p`` wants no gradient, and holds none, or zeros."""
    if p.requires_grad:
        return False
    return p.grad is None or is_zero(p.grad)


def is_zero(grad: torch.Tensor) -> bool:
    """Whether a gradient, dense or sparse, is zero everywhere."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return not bool(values.any())
