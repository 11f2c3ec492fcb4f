"""What programs written for Horovod import from its insides, under the names it has there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from ringlet.job import capabilities, lifecycle, observation, session, topology
from ringlet.job.elastic import HostsUpdatedInterrupt
from ringlet.job.process_sets import process_set_ranks
from ringlet.ring.errors import RingError as HorovodInternalError
from ringlet.ring.rendezvous.environment import detect
from ringlet.ring.transports.nccl_library import lacking

__all__ = [
    "HorovodBasics",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "get_env_rank_and_size",
    "gloo_built",
    "gpu_available",
    "in_thread",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
    "sycl_built",
]


class HorovodVersionMismatchError(ImportError):
    """An extension was built for another framework: never raised here, nothing is built."""


class HorovodBasics:
    """Lifecycle, topology and build queries as methods of one object."""

    init = staticmethod(lifecycle.init)
    shutdown = staticmethod(session.shutdown)
    is_initialized = staticmethod(session.is_initialized)
    start_timeline = staticmethod(observation.start_timeline)
    stop_timeline = staticmethod(observation.stop_timeline)
    size = staticmethod(topology.size)
    local_size = staticmethod(topology.local_size)
    cross_size = staticmethod(topology.cross_size)
    rank = staticmethod(topology.rank)
    local_rank = staticmethod(topology.local_rank)
    cross_rank = staticmethod(topology.cross_rank)
    is_homogeneous = staticmethod(topology.is_homogeneous)
    mpi_threads_supported = staticmethod(capabilities.mpi_threads_supported)
    mpi_enabled = staticmethod(capabilities.mpi_enabled)
    mpi_built = staticmethod(capabilities.mpi_built)
    gloo_enabled = staticmethod(capabilities.gloo_enabled)
    gloo_built = staticmethod(capabilities.gloo_built)
    nccl_built = staticmethod(capabilities.nccl_built)
    ddl_built = staticmethod(capabilities.ddl_built)
    ccl_built = staticmethod(capabilities.ccl_built)
    cuda_built = staticmethod(capabilities.cuda_built)
    rocm_built = staticmethod(capabilities.rocm_built)
    sycl_built = staticmethod(capabilities.sycl_built)
    _get_process_set_ids_and_ranks = staticmethod(process_set_ranks)

    def __init__(self, *_: Any) -> None:
        """Accept where Horovod's library lies; there is none."""


def check_extension(ext_name: str = "", ext_env_var: str = "", pkg_path: str = "", *_: Any) -> None:
    """Do nothing: there is no extension that could be missing."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework of that name is installed: nothing else is needed."""
    return find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether tensors on a GPU are reduced there, without the host."""
    return extension_available(ext_base_name) and lacking() is None


def mpi_built(verbose: bool = False) -> bool:
    """Whether the transport "mpi" is installed."""
    return capabilities.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Whether the transport "gloo" is installed."""
    return capabilities.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return NCCL's version as a number; 0 where the transport "nccl" lacks a part."""
    return capabilities.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM's DDL is there: it is not."""
    return capabilities.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Whether Intel's oneCCL is there: it is not."""
    return capabilities.ccl_built()


def sycl_built(verbose: bool = False) -> bool:
    """Whether SYCL, for Intel's GPUs, is there: it is not."""
    return capabilities.sycl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment for a while; those that are None stay as they are."""
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_iterable(x: Any) -> bool:
    """Whether one can iterate over ``x``."""
    return isinstance(x, Iterable)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return the rank and size that a launcher announced; (0, 1) without one."""
    launched = detect(os.environ)
    return launched.rank, launched.size


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version ``ver`` is ``target`` or a later one."""
    from packaging.version import parse

    return parse(ver) >= parse(target)


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Return a thread that has begun to run ``target(*args)``; ``silent`` hides its exceptions."""

    def quiet() -> None:
        try:
            target(*args)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=quiet, name=name, daemon=daemon)
    thread.start()
    return thread


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the items in ``count`` lists of nearly one length, in order."""
    each, more = divmod(len(items), count)
    ends = [i * each + min(i, more) for i in range(count + 1)]
    return [list(items[ends[i] : ends[i + 1]]) for i in range(count)]
