"""Parameters that were frozen in mid-training, which no reduction may move."""

from __future__ import annotations

import torch


def is_still(p: torch.Tensor) -> bool:
    """Whether ``p`` wants no gradient, and holds none, or zeros."""
    if p.requires_grad:
        return False
    grad = p.grad
    if grad is None:
        return True
    values = grad.coalesce().values() if grad.is_sparse else grad
    return not bool(values.any())
