"""Whether others use a tensor's memory too, which may not be reduced in place then.

Autograd hands one tensor on under several shapes: those of ``b.view(n) + c.view(n)`` have one
gradient in memory, and so has a layer below that is still to be differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

_storage_of: Any = torch.Tensor.untyped_storage
_address_of: Any = attrgetter("_cdata")
_start_of: Any = torch.Tensor.data_ptr
_uses: Any = torch._C._storage_Use_Count


def are_shared(tensors: Sequence[torch.Tensor], arriving: int | None = None) -> list[bool]:
    """Return of each strided tensor whether another one, known to Python or not, has its storage.

    Sparse ones count as not shared. ``arriving`` is the place of the gradient whose hook is
    running, if one is.
    """
    try:  # this is on the way of each gradient: C calls C
        uses = list(map(_uses, map(_address_of, map(_storage_of, tensors))))
    except RuntimeError:  # of a tensor without a storage of its own
        uses = [_uses_of(tensor) for tensor in tensors]
    if arriving is not None:
        uses[arriving] -= _passing()
    return list(map(_alone().__lt__, uses))


def address(tensor: torch.Tensor) -> int:
    """Return where the storage of a strided tensor is, which views of it have in common."""
    found: int = _address_of(_storage_of(tensor))
    return found


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor are one in memory, as ``expand`` makes them."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def any_overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of these strided tensors lie in the same memory, or are one."""
    twice = len(set(map(_start_of, tensors))) < len(tensors)
    return (twice or any(are_shared(tensors))) and any(overlaps(tensors))


def overlaps(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return of each strided tensor whether its memory overlaps that of another one of them."""
    spans = [_span(tensor) for tensor in tensors]
    filled = [i for i, (start, end) in enumerate(spans) if start < end]
    order = sorted(filled, key=spans.__getitem__)
    found, widest = [False] * len(spans), -1  # the one so far that ends last
    for i in order:
        if widest >= 0 and spans[i][0] < spans[widest][1]:
            found[i] = found[widest] = True
        if widest < 0 or spans[i][1] > spans[widest][1]:
            widest = i
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where the memory of a tensor begins and ends."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


def _uses_of(tensor: torch.Tensor) -> int:
    """Return how many uses the storage of ``tensor`` has, which this looks at among them."""
    if tensor.layout is not torch.strided:
        return 0
    uses: int = _uses(_address_of(_storage_of(tensor)))
    return uses


@functools.cache
def _alone() -> int:
    """Return how many uses a storage has that one tensor lies in."""
    return _uses_of(torch.empty(1))


@functools.cache
def _passing() -> int:
    """Return how many uses the storage of a gradient has in its hook that end with the hook.

    Older versions of torch still hold what has arrived there.
    """
    found: list[int] = []
    p: Any = torch.nn.Parameter(torch.zeros(1))

    def look(_: torch.Tensor) -> None:
        found.append(_uses_of(p.grad))

    p.register_post_accumulate_grad_hook(look)
    with torch.inference_mode(False), torch.enable_grad():
        (p * 3).sum().backward()
    return found[0] - _alone()
