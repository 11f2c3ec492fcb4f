"""Numba's ``njit`` for kernels that many processes compile at once, and keep in one folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.serialize import dumps


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
        except FileNotFoundError:
            return None
        return data if (stamp, found) == (self._source_stamp, key) else None

    def _name_for(self, key: Any) -> Any:
        digest = hashlib.sha256(repr((self._version, key)).encode()).digest()
        return self._data_name(int.from_bytes(digest[:8]))


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's, but for kernels that close over kernels: to Numba these differ between processes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file: Any = _FileOfEach(self._cache_path, self._impl.filename_base, stamp)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), _content(self._py_func)


def _content(function: Callable[..., Any], *callers: Callable[..., Any]) -> str:
    """Return a hash of a function's code and of what it closes over; callers are in it already."""
    digest = hashlib.sha256(function.__code__.co_code)
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        kernel = getattr(held, "py_func", None)
        if kernel is None:
            digest.update(dumps(held))
        elif kernel not in (function, *callers):
            digest.update(_content(kernel, function, *callers).encode())
    return digest.hexdigest()


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a function compiled by Numba on first use, without the GIL, and kept on disk.

    ``@jit`` or ``@jit(fastmath=...)``, with options of ``numba.njit``.
    """
    if function is None:
        return lambda function: jit(function, **options)
    dispatcher = njit(nogil=True, **options)(function)
    dispatcher._cache = _Cache(function)
    return dispatcher
