"""A rank's shard of a tensor over two levels, as the name of what is remembered of it.

The name tells which elements they are: among other hosts, a rank's shard may be another one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Self
from zlib import crc32

_SHARD = "shard."  # what names begin with; older ones told no elements behind it
_NUMBER = "(0|[1-9][0-9]{0,17})"
_NAME = re.compile(re.escape(_SHARD) + r"\.".join([_NUMBER] * 4) + r"\.([0-9a-f]{8})")


class ShardName(NamedTuple):
    """Of elements ``start`` to ``stop`` of a tensor of ``numel``, exchanged among ``hosts`` hosts.

    ``ranks`` stands for the ranks that exchange them: no others know what these have in common.
    """

    start: int
    stop: int
    numel: int
    hosts: int
    ranks: str

    @classmethod
    def of(cls, ranks: Sequence[int], start: int, stop: int, numel: int) -> Self:
        """Return the name of a shard that ``ranks``, one on each host, exchange."""
        told = ",".join(map(str, ranks))
        return cls(start, stop, numel, len(ranks), f"{crc32(told.encode()):08x}")

    @classmethod
    def read(cls, key: str) -> Self | None:
        """Return what ``key`` of a state names; None where that is no shard, or none can be so."""
        found = _NAME.fullmatch(key)
        if found is None:
            return None
        start, stop, numel, hosts = (int(number) for number in found.groups()[:4])
        sound = start <= stop <= numel and hosts > 0
        return cls(start, stop, numel, hosts, found[5]) if sound else None

    def __str__(self) -> str:
        return _SHARD + ".".join(map(str, self))


def is_shard(key: str) -> bool:
    """Whether ``key`` of a state names a shard, be it in an older way."""
    return key.startswith(_SHARD)
