"""What scripts do wrong with an optimizer's steps, in the words that they are told it with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ringlet.torch.tensors.views import dtype_of

NO_COPY = (
    "a DistributedOptimizer cannot be copied or pickled: it is tied to this process's parameters "
    "and peers. Copy or save optimizer.state_dict()"
)
REPEAT = "Call step() again first: it was interrupted, and the other ranks may have taken it"
RETIRED = "another DistributedOptimizer was made for the same parameters; use that one"
UNSYNCHRONIZED = (
    "step() inside skip_synchronize(), but backward() has run since the last synchronize(): call "
    "optimizer.synchronize() after backward(), or step() without skip_synchronize(). The step is "
    "given up, on all ranks; zero_grad() begins the next one"
)
_CLIP = (
    "clip it between optimizer.synchronize() and optimizer.step(), the latter inside "
    "optimizer.skip_synchronize(). A GradScaler waits only where it is enabled. Where a library "
    "clips, such as a Trainer with max_grad_norm, let DistributedDataParallel reduce, with "
    "hvd.ddp_hook"
)


def too_many_passes(name: str, passes: int) -> str:
    """Say that backward has reached a parameter after its last one of ``passes`` in a step."""
    return (
        f"the gradient of {name!r} was computed more than backward_passes_per_step={passes} times "
        "before step() of the DistributedOptimizer: call its step(), not that of what it wraps, "
        "and raise backward_passes_per_step to accumulate. If another loss's backward() reaches "
        "it, as a generator's does a discriminator, call requires_grad_(False) on it meanwhile; "
        "torch.utils.checkpoint takes use_reentrant=False"
    )


def changed_too_early(name: str, cure: str = "") -> str:
    """Say that a gradient is not what was handed in; ``cure`` is what to do instead of clipping."""
    return (
        f"the gradient of {name!r} was changed between backward() and synchronize() or step(), "
        f"when it is being reduced: {cure or _CLIP}. A second backward() changes it too. The step "
        "is given up, on all ranks; zero_grad() begins the next one"
    )


def converted(
    names: Iterable[str],
    parameters: Mapping[str, torch.Tensor],
    declared: Mapping[str, str],
    error: TypeError,
) -> str:
    """Say why gradients of ``names`` are refused: which one is not of the dtype it ``declared``.

    If all are, it is for what ``error`` says.
    """
    why = str(error)
    for name in names:
        now, then = dtype_of(parameters[name]), declared[name]
        if now != then:
            why = f"parameter {name!r} is {now} now, and was {then} when it was wrapped"
            break
    return (
        f"{why}. A model is converted, as by .double(), before DistributedOptimizer is made for it"
    )
