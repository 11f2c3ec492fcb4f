"""Kernels compile once per machine, not once per process."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ringlet.compressors.kernels.cpu.common import compiled
from ringlet.compressors.testing.tools.built_in import every_spec

CODE = """
import gc
import sys
import numpy as np
from numba.core.registry import CPUDispatcher
from ringlet.compressors import Context, parse
from ringlet.compressors.testing import simulate

def compiled():
    kernels = [o for o in gc.get_objects() if isinstance(o, CPUDispatcher)]
    return {{(k.py_func.__module__, k.__name__, str(s)) for k in kernels for s in k.overloads}}

for spec in {specs!r}:
    compressor = parse(spec)
    compressor.warm_up(Context())
    if sys.argv[1] == "use":
        warm, states = compiled(), [{{}}, {{}}]
        for step in range(2):
            x = np.ones(2500, np.float32)
            simulate(compressor, [x, 2 * x], states, step, shape=(50, 50))
        late = compiled() - warm
        assert not late, f"a step of {{spec}} compiles what warm_up() did not: {{late}}"
"""
SPECS = [
    "fp16", "bf16", "fp8", "fp8(format='e5m2', block=64)", "mxfp8",
    "mxfp6(stochastic=True)", "mxfp4", "nvfp4(stochastic=True)", "int8", "int4(stochastic=True)",
    "minmax", "qsgd", "natural", "terngrad", "onebit", "signsgd", "topk", "block_topk",
    "block_topk(bits=2)",
    "block_topk(ratio=0.25, block=64, bits=8, dct=True)", "randomk", "threshold", "topk_sampled",
    "sidco", "lossless", "lossless(dtype='fp32')", "shared_int", "shared_int(stochastic=True)",
    "terngrad_shared", "powersgd", "acpsgd", "topk | int8 | ef", "int4 | hadamard | ef",
    "qsgd(bits=4) | scaled | ef", "int8 | server_ef", "int8 | ef21", "topk | momentum_correction",
    "powersgd | ef", "int8 | ef(dtype='bf16')", "topk | ef(dtype='int8', reset=1)",
]  # fmt: skip


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.nb?"))


def test_a_second_process_finds_every_kernel_on_disk(tmp_path):
    # A copy of the tests' folder, where most kernels are by now and where other tests still write.
    folder, copy = Path(os.environ["NUMBA_CACHE_DIR"]), tmp_path / "kernels"
    if folder.exists():
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.tmp.*"))
    seen = []
    for what in ("warm", "use"):
        code = CODE.format(specs=every_spec(SPECS, ("none",)))
        env = {**os.environ, "NUMBA_CACHE_DIR": str(copy)}
        subprocess.run([sys.executable, "-c", code, what], check=True, timeout=500, env=env)
        seen.append(files(copy))
    assert seen[0], "nothing was cached"
    assert seen[1] == seen[0]


COUNT = """
import sys
from numba.core.registry import CPUDispatcher
import gc
from ringlet.compressors import Context, parse

sys.stdin.readline()  # all begin together
parse("terngrad").warm_up(Context())
kernels = [o for o in gc.get_objects() if isinstance(o, CPUDispatcher) and o.stats.cache_path]
for kernel in kernels:
    for signature in kernel.stats.cache_misses:
        print(kernel.py_func.__module__, kernel.py_func.__qualname__, signature)
"""


def misses(folder, processes):
    """Return what so many processes compile that share an empty folder, and begin together."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", COUNT]
    started = [subprocess.Popen(command, env=env, **pipes) for _ in range(processes)]
    for process in started:
        process.stdin.write("now\n")
        process.stdin.flush()
    told = [process.communicate(timeout=500)[0].splitlines() for process in started]
    assert not any(process.returncode for process in started)
    return sorted(line for lines in told for line in lines)


def test_processes_that_start_together_compile_a_kernel_once(tmp_path):
    alone = misses(tmp_path / "alone", 1)
    assert alone
    assert misses(tmp_path / "together", 3) == alone


def test_a_lock_that_nobody_gives_back_delays_and_no_more(tmp_path, monkeypatch):
    @compiled.njit(nogil=True, cache=True)
    def doubled(x):
        return x + x

    path = Path(doubled.stats.cache_path)
    path.mkdir(parents=True, exist_ok=True)
    name = f"{__name__}.{doubled.py_func.__qualname__}.lock".replace("<", "").replace(">", "")
    monkeypatch.setattr(compiled, "PATIENCE", 0.05)
    with (path / name).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert doubled(2) == 4
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert doubled(0.5) == 1.0


def no_locks(*_):
    raise OSError("this file system has none")
