"""Where tests keep compiled kernels, for every process that they start.

As a program this file compiles those of all built-in compressors with all cores, once for each
state of their sources. Otherwise the first tests of a fresh checkout compile them in jobs that have
limits of time, where one process waits for another.
"""

import hashlib
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

# Numba looks at a kernel's own file for changes, not at the ones it calls into: a cache of its own
# for every state of the sources keeps tests from running yesterday's kernels.
ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "compressors" / "kernels" / "cpu"
SOURCES = [
    *sorted(KERNELS.rglob("*.py")),
    *(ROOT / "ring" / f"{name}.py" for name in ("float16", "jit")),
]
STATE = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
# Nor does it look at whether kernels check bounds: those that do have a cache of their own too.
BOUNDS = "-bounds" if os.environ.get("NUMBA_BOUNDSCHECK", "0") not in ("", "0") else ""
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".kernels" / (STATE + BOUNDS)))

# Together they call every kernel; specs that begin alike stand side by side.
SPECS = [
    "powersgd", "powersgd | ef", "acpsgd",
    "block_topk", "block_topk(bits=2)", "block_topk(ratio=0.25, block=64, bits=8, dct=True)",
    "int8", "int8 | server_ef", "int8 | ef21", "int8 | ef(dtype='bf16')",
    "int4(stochastic=True)", "int4 | hadamard | ef",
    "topk", "topk | int8 | ef", "topk | momentum_correction", "topk | ef(dtype='int8', reset=1)",
    "fp16", "bf16", "fp8", "fp8(format='e5m2', block=64)", "mxfp8", "mxfp6(stochastic=True)",
    "mxfp4", "nvfp4(stochastic=True)", "minmax", "qsgd", "qsgd(bits=4) | scaled | ef", "natural",
    "terngrad", "onebit", "signsgd", "randomk", "threshold", "topk_sampled", "sidco", "lossless",
    "lossless(dtype='fp32')", "shared_int", "shared_int(stochastic=True)", "terngrad_shared",
]  # fmt: skip


def compile_all() -> None:
    """Compile what is not in the folder yet; a file there says of which sources all of it was."""
    from ringlet.compressors.testing.tools.built_in import every_spec
    from ringlet.job.warm_up import warm_up

    made = Path(os.environ["NUMBA_CACHE_DIR"]) / f"compiled-{STATE}"
    if made.exists():
        return
    cores, began = len(os.sched_getaffinity(0)), time.monotonic()
    print(f"Compiling the compressors' kernels, once, with {cores} processes.", flush=True)
    # Specs that begin alike call the same kernels: no two processes compile those.
    groups = groupby(every_spec(SPECS, ("none",)), lambda spec: spec.split("(")[0].split()[0])
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        list(pool.map(warm_up, [list(group) for _, group in groups]))
    made.parent.mkdir(parents=True, exist_ok=True)
    made.touch()
    print(f"Compiled them in {time.monotonic() - began:.0f} s.", flush=True)


if __name__ == "__main__":
    compile_all()
