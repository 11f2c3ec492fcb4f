"""Where kernels run: compiling and launching through CuPy, on its current device and stream."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy.typing as npt

from ringlet.compressors.core.context import Array
from ringlet.compressors.kernels.cuda.runtime.compile import binary
from ringlet.compressors.kernels.cuda.runtime.source import Program

Scratch = Callable[[str, int, npt.DTypeLike], Array]  # uninitialised device memory by name


class Device(Protocol):
    """What the launching code needs to know of a GPU."""

    def address(self, array: Array) -> int:
        """Return where the elements of ``array`` begin in device memory."""

    def read(self, array: Array) -> Array:
        """Return a copy of ``array`` on the host: the one call here that waits for the device."""

    def constant(self, name: str, array: Array) -> Array:
        """Return the NumPy ``array`` on the device; it is copied there once for each ``name``."""

    def launch(self, program: Program, kernel: str, blocks: int, table: npt.NDArray[Any]) -> None:
        """Run ``kernel`` on ``blocks`` blocks; ``table``, of one element, is passed by value."""


class CupyDevice:
    """The GPU that CuPy has selected. Kernels are compiled for it on first use."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._kernels: dict[tuple[int, Program, str], Any] = {}
        self._constants: dict[tuple[int, str], Array] = {}

    def address(self, array: Array) -> int:
        """Return the device pointer."""
        pointer: int = array.data.ptr  # type: ignore[attr-defined]  # a CuPy array
        return pointer

    def read(self, array: Array) -> Array:
        """Wait for CuPy's current stream."""
        copied: Array = array.get()  # type: ignore[attr-defined]  # a CuPy array
        return copied

    def constant(self, name: str, array: Array) -> Array:
        """Copy to the current device, and wait for that, once: any stream may read it then."""
        key = self._current(), name
        if key not in self._constants:
            copied = self._cupy.asarray(array)
            self._cupy.cuda.get_current_stream().synchronize()
            self._constants[key] = copied
        return self._constants[key]

    def launch(self, program: Program, kernel: str, blocks: int, table: npt.NDArray[Any]) -> None:
        """Launch on CuPy's current stream; nothing is waited for."""
        key = self._current(), program, kernel
        found = self._kernels.get(key)
        if found is None:
            self._load(key[0], program)
            found = self._kernels[key]
        found((blocks,), (program.threads,), (table,))

    def _current(self) -> int:
        return int(self._cupy.cuda.runtime.getDevice())

    def _load(self, number: int, program: Program) -> None:
        from cupy.cuda import nvrtc

        capability = int(self._cupy.cuda.Device(number).compute_capability)
        module = self._cupy.cuda.function.Module()
        module.load(binary(program, capability, nvrtc))
        for name in program.kernels:
            self._kernels[number, program, name] = module.get_function(name)


# Array modules by name; tests add one that runs the same kernels on the host.
_MAKERS: dict[str, Callable[[ModuleType], Device | None]] = {}


def device_of(xp: ModuleType) -> Device | None:
    """Return what runs kernels on arrays of ``xp``; None where array code has to do it."""
    maker = _MAKERS.get(xp.__name__)
    return None if maker is None else _made(xp, maker)


@cache
def _made(xp: ModuleType, maker: Callable[[ModuleType], Device | None]) -> Device | None:
    return maker(xp)


def _cupy(cupy: ModuleType) -> Device | None:
    if cupy.cuda.runtime.is_hip:
        logging.getLogger(__name__).warning("CuPy runs on ROCm: compressors use array code there")
        return None
    return CupyDevice(cupy)


_MAKERS["cupy"] = _cupy
