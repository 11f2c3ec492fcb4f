"""Numba's ``njit`` for kernels that many processes compile at once, and keep in one folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile


class _FileOfEach(IndexDataCacheFile):  # type: ignore[misc]  # Numba has no types
    """A file for each key, which says whose it is.

    Numba gives a function's overloads the next free number, notes the number in an index and then
    writes the file. Two processes take the same number for different overloads, and run each
    other's code; and who reads between index and file runs what the number stood for before
    (numba/numba#4807). Overloads of one function are its dtypes, and what it closes over: ``qsgd``
    and ``int8`` with and without ``ef`` are some of one.
    """

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name_for(key), (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        try:
            stamp, found, data = self._load_data(self._name_for(key))
        except OSError:  # there is none, or it is another user's
            return None
        return data if (stamp, found) == (self._source_stamp, key) else None

    def _name_for(self, key: Any) -> Any:
        digest = hashlib.sha256(repr((self._version, key)).encode()).digest()
        return self._data_name(int.from_bytes(digest[:8]))


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a function compiled by Numba on first use, without the GIL, and kept on disk.

    ``@jit`` or ``@jit(fastmath=...)``, with options of ``numba.njit``. It takes arrays of the
    shapes and dtypes that the function is written for, and compiles once for each. Raises
    RuntimeError where files can be kept neither beside the source nor in the user's cache.
    """
    if function is None:
        return lambda function: jit(function, **options)
    dispatcher = njit(nogil=True, **options)(function)
    cache = FunctionCache(function)
    kept = cache._cache_file
    cache._cache_file = _FileOfEach(cache.cache_path, cache._impl.filename_base, kept._source_stamp)
    dispatcher._cache = cache
    return dispatcher
