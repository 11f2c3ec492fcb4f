"""Whether all ranks hold the same bits in some arrays: one hash of them is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from ringlet.job import json_exchange
from ringlet.job.process_sets import global_process_set
from ringlet.ring.dtypes import Array


def equal_on_all_ranks(arrays: Iterable[tuple[str, Array]]) -> bool:
    """Whether all ranks hold the same ``arrays``, bit for bit. Collective, one answer for all.

    Each comes with what else must be equal, in words: a name, a dtype, a shape.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for words, array in arrays:
        hashed.update(words.encode())
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return json_exchange.alike(hashed.digest(), "replicas_equal", global_process_set)
