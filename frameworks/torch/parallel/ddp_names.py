"""What a model under DistributedDataParallel calls its parameters: DDP tells a hook no names.

Places among DDP's buckets are no names to keep memory by: they depend on DDP's options, and differ
where a program, or a newer torch, fills buckets otherwise.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence

import torch

from ringlet.torch.optimizer.double_reduction import living_ddps

_PLACE = re.compile(r"bucket\d+(\.\d+)+")


def names_in_ddp(state: object, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's parameters by name, if a hook with this ``state`` is registered there.

    It is the model that holds all of ``parameters``. Returns none where there is no such model.
    """
    wanted = {id(p) for p in parameters}
    for ddp in living_ddps():
        if any(held is state for _, held in getattr(ddp, "_comm_hooks", ())):
            named: dict[str, torch.Tensor] = dict(ddp.module.named_parameters())
            if wanted <= {id(p) for p in named.values()}:
                return named
    return {}


def checksum(names: Iterable[str]) -> int:
    """Return 32 bits of ``names``, in whatever order."""
    return zlib.crc32("\n".join(sorted(names)).encode())


def is_place(name: str) -> bool:
    """Whether a parameter was called so for its place among DDP's buckets."""
    return _PLACE.fullmatch(name) is not None


class BucketPlaces:
    """The places at which a hook first saw parameters: what they were called without names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def see(self, place: str) -> str:
        """Return what a parameter was called that is seen at ``place``, once for each."""
        # With static_graph all of the first step's buckets have one number.
        name = f"{place}.{len(self._seen)}" if place in self._seen else place
        self._seen.add(name)
        return name
