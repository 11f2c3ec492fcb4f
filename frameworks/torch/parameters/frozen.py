"""Parameters that were frozen in mid-training, which no reduction may move, or thawed too late."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

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


def refuse_strays(
    param_groups: Iterable[Mapping[str, Any]], known: Container[torch.Tensor], kind: str, cure: str
) -> None:
    """Raise RuntimeError if a parameter has a gradient and is none of ``known``, those of ``kind``.

    It would be another one on each rank from the next step on. Zeros that ``zero_grad`` has left on
    a frozen parameter are the same on all.
    """
    for i, group in enumerate(param_groups):
        for j, p in enumerate(group["params"]):
            if p.grad is not None and p not in known and not is_still(p):
                raise RuntimeError(
                    f"parameter {j} of group {i}, shape {list(p.shape)}, was added or unfrozen "
                    f"after {kind} was made, so its gradient is not reduced; {cure}"
                )
