"""Numba's ``njit`` for kernels that many processes compile at once, and keep in one folder."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import EnumType
from types import CodeType, FunctionType, ModuleType
from typing import Any, BinaryIO

import numpy as np
from numba import config, njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic
from numba.core.serialize import dumps
from numba.np.ufunc.dufunc import DUFunc

from ringlet.ring.safe_files import read_own, replacing

log = logging.getLogger("ringlet")

_DIGEST = hashlib.sha256().digest_size
_told: set[str] = set()  # why kernels are not kept, or not loaded, which is said once


class _FileOfEach(IndexDataCacheFile):  # type: ignore[misc]  # Numba has no types
    """A file for each key, which says whose it is.

    Numba gives a function's overloads the next free number, notes the number in an index and then
    writes the file. Two processes take the same number for different overloads, and run each
    other's code; and who reads between index and file runs what the number stood for before
    (numba/numba#4807). Overloads of one function are its dtypes, and what it closes over: ``qsgd``
    and ``int8`` with and without ``ef`` are some of one.

    To load a file is to run what it says: one that another user can have written is not loaded.
    """

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name_for(key), (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        try:
            stamp, found, data = self._load_data(self._name_for(key))
        except PermissionError as error:
            _tell_refused(error)
            return None
        except Exception:  # there is none, or the power went while it was written
            return None
        return data if (stamp, found) == (self._source_stamp, key) else None

    def _dump(self, data: Any) -> bytes:
        made: bytes = dumps(data)
        return hashlib.sha256(made).digest() + made

    def _load_data(self, name: str) -> Any:
        found = read_own(self._data_path(name))
        digest, made = found[:_DIGEST], found[_DIGEST:]
        if hashlib.sha256(made).digest() != digest:
            raise EOFError("the file is damaged")
        return pickle.loads(made)

    def _open_for_write(self, filepath: str) -> AbstractContextManager[BinaryIO]:
        return replacing(filepath, 0o644)  # not for a group to write, whatever the umask

    def _name_for(self, key: Any) -> Any:
        *key, _ = key  # what has other code replaces what was at its place before
        digest = hashlib.sha256(repr((self._version, key)).encode()).digest()
        return self._data_name(int.from_bytes(digest[:8]))


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's, which knows a kernel by what it calls and closes over too, kernels among them.

    To Numba those differ between processes; and what is called from another file it does not look
    at, so that an edited helper leaves the kernels as they were.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel.py_func)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file: Any = _FileOfEach(self._cache_path, self._impl.filename_base, stamp)
        self._kernel, self._name = kernel, kernel.py_func.__qualname__
        self._content = ("", "")  # of the last that was looked for, which is the next to be saved

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Numba tells symbols apart by a number that it counts in each process, and the linker takes
        # the first of two with one name: what another process compiled must not have ours.
        self._content = _held(self._kernel), _code(self._kernel)
        digest = hashlib.sha256("".join(self._content).encode()).hexdigest()[:16]
        self._py_func.__qualname__ = f"{self._name}_{digest}"
        for helper in _helpers(self._kernel):  # whose symbols become part of ours
            held = hashlib.sha256((_held(helper) + _code(helper)).encode()).hexdigest()[:16]
            helper.py_func.__qualname__ = f"{helper.py_func.__code__.co_qualname}_{held}"
        return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        if " at 0x" in repr(sig):  # a kernel is an argument, which no other process will find
            return
        try:
            super().save_overload(sig, data)
        except OSError as error:  # a full disk, say: what was compiled works without a file
            why = error.strerror or str(error)
            _tell(why, f"in {self._cache_path} ({why})")

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), *self._content


def _tell(why: str, where: str) -> None:
    if why not in _told:
        _told.add(why)
        log.warning(
            "compiled kernels cannot be kept %s, so that each process compiles them anew; "
            "NUMBA_CACHE_DIR names another folder",
            where,
        )


def _tell_refused(error: PermissionError) -> None:
    why = error.strerror or ""
    if why not in _told:
        _told.add(why)
        log.warning(
            "compiled kernels that another user may have written are not loaded, and are compiled "
            "anew, such as %s (%s); name a folder of your own in NUMBA_CACHE_DIR",
            error.filename,
            why,
        )


def _held(kernel: Any, *callers: Any) -> str:
    """Return a hash of a kernel's name, options, and what it closes over; callers are known."""
    code = kernel.py_func.__code__
    options = sorted(kernel.targetoptions.items())
    digest = hashlib.sha256(repr((kernel.__module__, code.co_qualname, options)).encode())
    for held in _flat(cell.cell_contents for cell in kernel.py_func.__closure__ or ()):
        if isinstance(held, Dispatcher):
            if held not in (kernel, *callers):
                digest.update(_held(held, kernel, *callers).encode())
        elif not isinstance(held, _Intrinsic):  # whose pickle is another in each process
            digest.update(dumps(held))
    return digest.hexdigest()


def _code(kernel: Any) -> str:
    """Return a hash of the code of a kernel, and of all that it calls and names, in any file."""
    digest = hashlib.sha256(repr(sorted(kernel.locals.items())).encode())
    for function, values in _reached(kernel):
        digest.update(repr(_instructions(function.__code__)).encode())
        for value in values:
            if isinstance(value, Dispatcher):
                options = sorted(value.targetoptions.items()), sorted(value.locals.items())
                digest.update(repr(options).encode())
            elif isinstance(value, np.ndarray):  # a table
                digest.update(repr((value.dtype, value.shape)).encode() + value.tobytes())
            elif isinstance(value, EnumType):
                digest.update(repr([*value]).encode())
            elif _is_plain(value):
                digest.update(repr(value).encode())
    return digest.hexdigest()


def _helpers(kernel: Any) -> Iterator[Any]:
    """Yield what a kernel calls that Numba compiled with other values closed over, and not we."""
    for _, values in _reached(kernel):
        for value in values:
            ours = isinstance(getattr(value, "_cache", None), _Cache)
            if isinstance(value, Dispatcher) and value.py_func.__closure__ and not ours:
                yield value


def _reached(kernel: Any) -> Iterator[tuple[FunctionType, list[Any]]]:
    """Yield a kernel's function and all that it calls, each with what it closes over and names."""
    known, waiting = set(), [kernel.py_func]
    while waiting:
        function = waiting.pop()
        if function in known:
            continue
        known.add(function)
        values = list(_flat((*(function.__defaults__ or ()), *_named(function))))
        yield function, values
        for value in values:
            if isinstance(value, Dispatcher):
                waiting.append(value.py_func)
            elif isinstance(value, DUFunc):
                waiting.append(value._dispatcher.py_func)
            elif isinstance(value, _Intrinsic):
                waiting.append(value._defn)
            elif isinstance(value, FunctionType) and not _installed(value.__module__):
                waiting.append(value)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those of tuples that hold more than plain ones."""
    for value in values:
        if isinstance(value, tuple) and not _is_plain(value):
            yield from _flat(value)
        else:
            yield value


def _installed(module: str | None) -> bool:
    """Whether a module is of Numba, or of what Numba knows, whose versions it looks at itself."""
    return (module or "").partition(".")[0] in ("numba", "llvmlite", "numpy", "math", "operator")


def _instructions(code: CodeType) -> Any:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constant = _instructions(constant)
        elif isinstance(constant, frozenset):  # of strings: in another order in each process
            constant = sorted(map(repr, constant))
        constants.append(constant)
    return code.co_code, code.co_names, constants


def _named(function: Any) -> Iterator[Any]:
    """Yield what a function closes over and names, and what it names of modules."""
    names = [*_names(function.__code__)]
    waiting = [cell.cell_contents for cell in function.__closure__ or ()]
    waiting += map(function.__globals__.get, names)
    modules = set()
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, ModuleType) and value not in modules:
            modules.add(value)
            waiting += map(vars(value).get, names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_plain(value: Any) -> bool:
    """Whether a value looks the same in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    plain = (int, float, complex, str, bytes, np.generic, np.dtype, types.Number, type)
    return isinstance(value, plain)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a function compiled by Numba on first use, without the GIL, and kept on disk.

    ``@jit`` or ``@jit(fastmath=...)``, with options of ``numba.njit``. It takes arrays of the
    shapes and dtypes that the function is written for, and compiles once for each. With
    ``NUMBA_DISABLE_JIT=1`` it is the function itself, for a debugger to step through. Where files
    can be kept neither beside the source nor in the user's cache, each process compiles anew.
    """
    if function is None:
        return lambda function: jit(function, **options)
    kernel = njit(nogil=True, **options)(function)
    if config.DISABLE_JIT:  # it is the function
        return kernel
    try:
        kernel._cache = _Cache(kernel)
    except RuntimeError as error:
        if "no locator available" not in str(error):  # a variable of Numba's that makes no sense
            raise
        _tell("nowhere", "beside their sources, in NUMBA_CACHE_DIR or in the user's cache")
    return kernel
