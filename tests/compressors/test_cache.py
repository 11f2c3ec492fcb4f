"""Kernels compile once per machine, not once per process."""

import os
import subprocess
import sys

from ringlet.compressors import Compressor, names, parse

CODE = """
import sys
import numpy as np
from ringlet.compressors import Context, names, parse
from ringlet.compressors.testing import simulate
used = sys.argv[1] == "use"
for spec in {specs!r}:
    compressor = parse(spec)
    if used:
        states = [{{}}, {{}}]
        for step in range(2):
            x = np.ones(2500, np.float32)
            simulate(compressor, [x, 2 * x], states, step, shape=(50, 50))
    else:
        compressor.warm_up(Context())
"""
SPECS = [
    "fp16", "bf16", "fp8", "fp8(format='e5m2', block=64)", "int8", "int4(stochastic=True)",
    "minmax", "qsgd", "natural", "terngrad", "onebit", "signsgd", "topk", "block_topk",
    "block_topk(bits=2)",
    "block_topk(ratio=0.25, block=64, bits=8, dct=True)", "randomk", "threshold", "topk_sampled",
    "sidco", "lossless", "lossless(dtype='fp32')", "shared_int", "shared_int(stochastic=True)",
    "terngrad_shared", "powersgd", "acpsgd", "topk | int8 | ef", "int4 | hadamard | ef",
    "qsgd(bits=4) | scaled | ef", "int8 | server_ef", "int8 | ef21", "topk | momentum_correction",
    "powersgd | ef",
]  # fmt: skip


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.nb?"))


def test_a_second_process_finds_every_kernel_on_disk(tmp_path):
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    seen = []
    for what in ("warm", "warm", "use"):
        code = CODE.format(specs=SPECS)
        subprocess.run([sys.executable, "-c", code, what], check=True, env=env, timeout=500)
        seen.append(files(tmp_path))
    assert seen[0], "nothing was cached"
    assert seen[1] == seen[0]
    assert seen[2] == seen[0], "a step compiles what warm_up() did not"


def test_every_compressor_is_listed():
    listed = {parse(spec) for spec in SPECS}
    found = {part.spec_name for c in listed for part in parts(c)}
    assert found >= set(names()) - {"none", "warmup", "min_size", "maxnorm"}


def parts(compressor):
    inside = [part for part in vars(compressor).values() if isinstance(part, Compressor)]
    return [compressor, *(p for part in inside for p in parts(part))]
