"""Kernels compile once per machine, not once per process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kernel_cache import SPECS

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


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.nb?"))


def test_a_second_process_finds_every_kernel_on_disk(tmp_path):
    # A copy of the tests' folder, where most kernels are by now and where other tests still write.
    folder, copy = Path(os.environ["NUMBA_CACHE_DIR"]), tmp_path / "kernels"
    if folder.exists():
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.part"))
    seen = []
    for what in ("warm", "use"):
        code = CODE.format(specs=every_spec(SPECS, ("none",)))
        env = {**os.environ, "NUMBA_CACHE_DIR": str(copy)}
        subprocess.run([sys.executable, "-c", code, what], check=True, timeout=500, env=env)
        seen.append(files(copy))
    assert seen[0], "nothing was cached"
    assert seen[1] == seen[0]
