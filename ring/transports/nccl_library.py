"""NVIDIA's NCCL by ctypes: finding it, its version, its calls by name.

The library comes from the wheel ``nvidia-nccl-cu12`` or ``nvidia-nccl-cu13``, or from the system.
Loading it, its version and unique ids need no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

SUCCESS, IN_PROGRESS, REMOTE_ERROR = 0, 7, 6
ID_BYTES = 128
LEAST = 21800  # 2.18: non-blocking initialisation with the fields of _Config

_UNDEFINED = -(1 << 31)
_SIZE, _POINTER, _INT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "ncclCommFinalize": [_POINTER],
    "ncclCommDestroy": [_POINTER],
    "ncclCommAbort": [_POINTER],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(_INT)],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclReduceScatter": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.18; later versions only add to it and accept this much."""

    _fields_ = (
        ("size", _SIZE),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", _INT),
        ("cga_cluster_size", _INT),
        ("min_ctas", _INT),
        ("max_ctas", _INT),
        ("net_name", ctypes.c_char_p),
        ("split_share", _INT),
    )


class Lacking(NamedTuple):
    """What is missing, and how to get it."""

    why: str
    remedy: str


class Library:
    """The loaded library. Calls return NCCL's result codes; handles are integers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetLastError.argtypes = [_POINTER]
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(_POINTER), _INT, _Id, _INT, ctypes.POINTER(_Config)
        ]  # fmt: skip

    def version(self) -> int:
        """Return the version as one number: 22403 for 2.24.3."""
        number = _INT()
        self._library.ncclGetVersion(ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """Return a new id, by which the ranks of one communicator find each other.

        Raises OSError where NCCL finds no network interface to wait on.
        """
        made = _Id()
        if code := self._library.ncclGetUniqueId(ctypes.byref(made)):
            raise OSError(f"NCCL has no unique id to give: {self.explain(code, 0)}")
        return bytes(made)

    def join(self, size: int, unique_id: bytes, rank: int) -> tuple[int, int]:
        """Begin to join ``size`` ranks without waiting for them; return (code, handle)."""
        handle = _POINTER()
        config = _Config(
            ctypes.sizeof(_Config), 0xCAFEBEEF, LEAST, 0, *[_UNDEFINED] * 3, None, _UNDEFINED
        )
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(handle), size, _Id.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        return int(code), handle.value or 0

    def state(self, handle: int) -> int:
        """Return the code of what is under way on a communicator."""
        code = _INT()
        asked = self._library.ncclCommGetAsyncError(handle, ctypes.byref(code))
        return int(asked) or code.value

    def call(self, name: str, *arguments: int) -> int:
        """Call ``ncclName`` and return its code."""
        return int(getattr(self._library, f"nccl{name}")(*arguments))

    def explain(self, code: int, handle: int) -> str:
        """Return what a code means, and what NCCL says of the last failure."""
        meaning = self._library.ncclGetErrorString(code) or b""
        detail = self._library.ncclGetLastError(handle or None) or b""
        return ": ".join(part.decode(errors="replace") for part in (meaning, detail) if part)


@functools.cache
def load() -> Library | None:
    """Return the library, from a wheel if there is one; None where there is none."""
    for name in (*_wheels(), "libnccl.so.2"):
        try:
            return Library(ctypes.CDLL(name))
        except (OSError, AttributeError):  # not there, or too old to have these calls
            continue
    return None


def lacking(gpu: bool = True) -> Lacking | None:
    """Return the first thing that the transport "nccl" lacks here; None if it can work.

    ``gpu``: whether a GPU is needed here, as it is for ranks and not for who starts them.
    """
    install = "pip install 'ringlet[cuda12]' or 'ringlet[cuda13]', as your driver is"
    library = load()
    if library is None:
        return Lacking("the NCCL library is not installed", install)
    if library.version() < LEAST:
        return Lacking(f"NCCL {library.version()} is older than {LEAST}", install)
    if importlib.util.find_spec("cupy") is None:
        return Lacking("cupy is not installed", install)
    if not gpu:
        return None
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except (RuntimeError, ImportError, OSError) as error:  # no driver, or no CUDA runtime
        return Lacking(f"no NVIDIA GPU can be used here ({error})", "See what `nvidia-smi` says.")
    return None if count else Lacking("there is no NVIDIA GPU here", "Use 'gloo' or 'mpi'.")


def _wheels() -> list[str]:
    found = importlib.util.find_spec("nvidia")
    places = found.submodule_search_locations if found else None
    return [
        str(path) for place in places or () for path in Path(place).glob("nccl/lib/libnccl.so.2")
    ]
