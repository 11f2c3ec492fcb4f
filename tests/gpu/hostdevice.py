"""The CUDA sources, compiled for the host: the stronger oracle where there is no GPU.

``array_module()`` is an array module that behaves like NumPy, and on whose arrays compressors run
their CUDA kernels; ``HostDevice`` compiles them with g++ and the header ``host.h``.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import numpy as np

from ringlet.compressors.kernels.cuda import device as devices

HEADER = Path(__file__).parent / "host.h"
FLAGS = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"]
COMPILER = shutil.which("g++") or shutil.which("clang++")
REASON = "needs g++ or clang++ to compile CUDA sources for the host"


class HostDevice:
    """Runs kernels on NumPy arrays. ``launches`` counts; ``backwards`` reverses the threads."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.backwards, self.launches = cache, False, 0
        self._libraries = {}

    def address(self, array):
        assert array.flags.c_contiguous
        return array.ctypes.data

    def launch(self, program, kernel, blocks, table):
        self.launches += 1
        entry = getattr(self._library(program), f"host_{kernel}")
        entry(blocks, devices.THREADS, ctypes.c_void_p(table.ctypes.data), int(self.backwards))

    def _library(self, program):
        found = self._libraries.get(program)
        if found is None:
            found = self._libraries[program] = ctypes.CDLL(str(self._compiled(program)))
        return found

    def _compiled(self, program):
        entries = "\n".join(
            f'extern "C" void host_{k}(unsigned blocks, unsigned threads, const void* bytes, '
            f"int backwards) {{ host::launch(&{k}, blocks, threads, bytes, backwards); }}"
            for k in program.kernels
        )
        # A copy by value of a const argument: the signature without const is the one to deduce.
        text = "\n".join([HEADER.read_text(), program.source(), entries])
        name = hashlib.sha256("\n".join([*FLAGS, text]).encode()).hexdigest()[:20]
        target = self.cache / f"{name}.so"
        if not target.exists():
            self.cache.mkdir(parents=True, exist_ok=True)
            source = self.cache / f"{name}.cpp"
            source.write_text(text)
            made = self.cache / f"{name}.{os.getpid()}"
            done = subprocess.run(
                [COMPILER, *FLAGS, "-o", made, source], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[:4000]
            made.rename(target)
        return target


def array_module(device, name="host_cuda"):
    """Return a module like NumPy, whose arrays ``device`` works on."""
    module = types.ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(np, attribute)
    devices._MAKERS[name] = lambda xp: device
    return module
