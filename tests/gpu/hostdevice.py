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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ringlet.compressors import Modifier, TopK, parse
from ringlet.compressors.kernels.cuda.common import elementwise, scatter
from ringlet.compressors.kernels.cuda.runtime import device as devices
from ringlet.compressors.kernels.cuda.sparsifiers import topk

HEADER = Path(__file__).parent / "host.h"
FLAGS = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"]
COMPILER = shutil.which("g++") or shutil.which("clang++")
WORKERS = 2
CACHE = Path(__file__).parents[2] / ".kernels" / "cuda"
REASON = "needs g++ or clang++ to compile CUDA sources for the host"


class HostDevice:
    """Runs kernels on NumPy arrays; ``launches`` and ``reads`` count.

    ``backwards`` reverses the threads.
    """

    def __init__(self, cache: Path) -> None:
        self.cache, self.backwards, self.launches, self.reads = cache, False, 0, 0
        self._libraries, self.constants = {}, {}

    def address(self, array):
        assert array.flags.c_contiguous
        return array.ctypes.data

    def read(self, array):
        self.reads += 1
        return array.copy()

    def constant(self, name, array):
        return self.constants.setdefault(name, array)

    def launch(self, program, kernel, blocks, table):
        self.launches += 1
        library, name = self._library(program)
        entry = getattr(library, f"{name}_{kernel}")
        entry(blocks, program.threads, ctypes.c_void_p(table.ctypes.data), int(self.backwards))

    def prepare(self, programs):
        """Compile what is missing of ``programs``, many in one go: headers cost the most."""
        missing = [p for p in dict.fromkeys(programs) if not (self.cache / _name(p)).exists()]
        groups = [missing[i::WORKERS] for i in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(self._compile, [group for group in groups if group]))

    def _library(self, program):
        found = self._libraries.get(program)
        if found is None:
            self.prepare([program])
            library = (self.cache / _name(program)).read_text()
            found = ctypes.CDLL(str(self.cache / library)), _name(program)
            self._libraries[program] = found
        return found

    def _compile(self, programs):
        """Compile ``programs`` into one library, each in a namespace of its own."""
        self.cache.mkdir(parents=True, exist_ok=True)
        text = [HEADER.read_text()]
        for program in programs:
            # A C function has one name in all namespaces.
            body = program.source().replace('extern "C" __global__', "__global__")
            text.append(f"namespace {_name(program)} {{\n{body}\n}}")
            text += [
                f'extern "C" void {_name(program)}_{kernel}(unsigned blocks, unsigned threads, '
                f"const void* bytes, int backwards) {{ host::launch(&{_name(program)}::{kernel}, "
                "blocks, threads, bytes, backwards); }"
                for kernel in program.kernels
            ]
            text += [f"#undef {line.split()[1].split('(')[0]}" for line in _macros(body)]
        name = _digest("\n".join(text))
        source, library = self.cache / f"{name}.cpp", self.cache / f"{name}.{os.getpid()}"
        source.write_text("\n".join(text))
        done = subprocess.run(
            [COMPILER, *FLAGS, "-o", library, source], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[:4000]
        library.rename(self.cache / f"{name}.so")
        for program in programs:
            (self.cache / _name(program)).write_text(f"{name}.so")


def programs(spec, kinds=(0, 1, 2), feedback=(0, 1)):
    """Return what multi-tensor kernels of ``spec`` are compiled from, for numbers of dtypes.

    ``kinds`` has float32, which is 0, in any case; ``feedback`` tells whether with it or without.
    """
    c, kinds = parse(spec), sorted({0, *kinds})
    while isinstance(c, Modifier):
        c = c.inner
    if isinstance(c, TopK):
        found = [topk.program(kind, on) for kind in kinds for on in feedback]
        return [*found, scatter.PROGRAM, elementwise.PROGRAM]
    codec = c.cuda()
    found = [codec.program("encode", INPUT=kind, FEEDBACK=on) for kind in kinds for on in feedback]
    found += [codec.program("decode", OUTPUT=kind) for kind in kinds if codec.fused or not kind]
    if codec.fused:
        found += [codec.program("encode", SUMMED=1, FEEDBACK=on) for on in feedback]
    return [*found, codec.program("decode", ADDING=1)]


def _macros(text):
    return [line for line in text.splitlines() if line.startswith("#define")]


def _digest(text):
    return "k" + hashlib.sha256(text.encode()).hexdigest()[:20]


def _name(program):
    return _digest("\n".join([*FLAGS, HEADER.read_text(), program.source()]))


def array_module(device, name="host_cuda"):
    """Return a module like NumPy, whose arrays ``device`` works on."""
    module = types.ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(np, attribute)
    devices._MAKERS[name] = lambda xp: device
    return module
