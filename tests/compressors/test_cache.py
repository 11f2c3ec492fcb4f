"""Kernels compile once per machine, not once per process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
            x.flags.writeable = step == 0  # as what JAX lends is not
            simulate(compressor, [x, x], states, step, shape=(50, 50))
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
