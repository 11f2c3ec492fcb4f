"""Who this rank is, asked at run time: as graph nodes that are right after a new ``init`` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ringlet.job.process_sets import ProcessSet, process_set_ranks
from ringlet.job.session import current
from ringlet.ring.dtypes import Array
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.tensorflow.ops.bridge import as_written, run


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks in a process set, as a scalar (int32) evaluated when it runs."""
    return _scalar(lambda: len(_ranks(process_set_id)))


@as_written
def rank_op(name: str | None = None) -> Any:
    """Return this rank, as a scalar (int32) evaluated when it runs."""
    return _scalar(lambda: current().rank)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host, as a scalar (int32) evaluated when it runs."""
    return _scalar(lambda: current().topology.local_size)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """Return this rank among those of its host, as a scalar (int32) evaluated when it runs."""
    return _scalar(lambda: current().topology.local_rank)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set, else 0 (int32), evaluated when it runs."""
    return _scalar(lambda: int(current().rank in _ranks(process_set_id)))


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether ``num_rank`` is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_num_rank_power_of_2(num_rank: int) -> None:
    """Raise ValueError unless ``num_rank`` is a power of two."""
    if not num_rank_is_power_2(num_rank):
        raise ValueError(f"the number of ranks must be a power of 2, not {num_rank}")


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU. The arguments are accepted for Horovod's sake."""
    return bool(tf.config.list_physical_devices("GPU"))


def ranks_stay() -> bool:
    """Whether what is true of the ranks now is so whenever what is traced now runs."""
    return tf.executing_eagerly() or not is_elastic()


def size_of(process_set: ProcessSet) -> Any:
    """Return how many ranks ``process_set`` has, or 1 outside it: a node where that may change."""

    def ask() -> int:
        return process_set.size() if process_set.included() else 1

    return ask() if ranks_stay() else _scalar(ask)


def rank_in(process_set: ProcessSet) -> Any:
    """Return this rank's place in ``process_set``: a node where that may change."""
    return process_set.rank() if ranks_stay() else _scalar(process_set.rank)


def _scalar(ask: Callable[[], int]) -> Any:
    def tell(_: list[Array]) -> list[Array]:
        return [np.array(ask(), np.int32)]

    return run(tell, [], [("int32", ())])[0]


def _ranks(process_set_id: int) -> list[int]:
    known = process_set_ranks()
    if process_set_id not in known:
        raise ValueError(f"there is no process set {process_set_id}; there are {sorted(known)}")
    return known[process_set_id]
