"""Optimizers that cannot be wrapped, or are none, or hold what nobody trains."""

from __future__ import annotations

import warnings

import torch

from ringlet.ring.callers import outside


def check_is_optimizer(optimizer: object) -> None:
    """Raise TypeError unless ``optimizer``, the first argument of a call, is one of torch's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"the first argument is a torch optimizer, such as torch.optim.SGD(model.parameters(), "
            f"lr=0.1), not {_described(optimizer)}"
        )


def refuse_partitioned(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raise ValueError, with ``why``, for an optimizer whose ranks each step on their own part.

    So torch's ZeroRedundancyOptimizer and FairScale's OSS do, and send it to the others.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    for kind in sorted(kinds & {"ZeroRedundancyOptimizer", "OSS"}):
        raise ValueError(f"{kind} lets each rank step on a part of the parameters alone: {why}")


def refuse_inner_groups(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Raise ValueError, with ``why``, if the optimizer has one inside with groups of its own."""
    own = {id(group) for group in optimizer.param_groups}
    inside = [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]
    for inner in inside:
        if any(id(group) not in own for group in inner.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} steps by a {type(inner).__name__} inside, with "
                f"parameter groups of its own: {why}"
            )


def warn_of_no_gradients(count: int) -> None:
    """Warn that none of an optimizer's ``count`` parameters has a gradient in its first step."""
    warnings.warn(
        f"backward() has given none of the {count} parameter(s) of this DistributedOptimizer a "
        "gradient on this rank before its first step(). If the model has other parameters by now, "
        "make the optimizer of those: fully_shard, for one, replaces them (and hvd.compress_fsdp "
        "reduces them, with the bare optimizer)",
        stacklevel=outside(),
    )


def _described(value: object) -> str:
    """Return what was given instead of an optimizer, in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "the model" if isinstance(value, torch.nn.Module) else f"a {type(value).__name__}"
