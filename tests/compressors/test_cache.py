"""Kernels compile once per machine, not once per process."""

import os
import subprocess
import sys

CODE = """
from ringlet.compressors import Context, parse, names
for spec in {specs!r}:
    parse(spec).warm_up(Context())
"""
SPECS = ["fp16", "bf16", "int8", "int4(stochastic=True)", "minmax", "qsgd", "topk"]


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.nb?"))


def test_a_second_process_finds_every_kernel_on_disk(tmp_path):
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    seen = []
    for _ in range(2):
        code = CODE.format(specs=SPECS)
        subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=240)
        seen.append(files(tmp_path))
    assert seen[0], "nothing was cached"
    assert seen[1] == seen[0]
