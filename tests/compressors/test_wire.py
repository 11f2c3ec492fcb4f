"""The wire format is frozen: a change of any byte shows here, and must be meant.

python tests/compressors/test_wire.py     # writes the fixtures anew
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ringlet.compressors import Context, parse

FIXTURES = Path(__file__).with_name("wire.json")
SPECS = [
    "fp16", "bf16", "fp8", "fp8(format='e5m2')", "mxfp8", "mxfp8(format='e5m2')", "mxfp6",
    "mxfp6(format='e3m2')", "mxfp4", "mxfp4(stochastic=True)", "nvfp4", "nvfp4(stochastic=True)",
    "int8(bucket=32)", "int4(bucket=32)",
    "int4(bucket=32, stochastic=True)", "maxnorm(bits=3, bucket=32)", "minmax(bits=4, bucket=32)",
    "qsgd(bucket=32)", "natural", "terngrad", "onebit", "signsgd", "topk(ratio=0.1)",
    "topk(ratio=0.2) | int8(bucket=32)", "block_topk(ratio=0.1)", "randomk(ratio=0.1)",
    "threshold(value=1.5)", "lossless", "int8(bucket=32) | ef",
    "int8(bucket=32) | hadamard(block=64)",
]  # fmt: skip


def payload(spec):
    """Return the arrays that 75 fixed values become at step 3 of rank 1, as text."""
    steps = np.arange(75, dtype=np.float32)
    x = (np.sin(steps * np.float32(1.7)) * (1 + steps % 7)).astype(np.float32)
    x = (np.round(x * 1024) / 1024).astype(np.float32)  # the same on every machine's libm
    ctx = Context(name="layer.weight", shape=(75,), numel=75, step=3, rank=1, size=4, seed=5)
    arrays = parse(spec).compress(x, ctx)
    return {name: [a.dtype.name, a.tobytes().hex()] for name, a in sorted(arrays.items())}


@pytest.mark.parametrize("spec", SPECS)
def test_payloads_are_the_ones_on_record(spec):
    assert payload(spec) == json.loads(FIXTURES.read_text())[spec]


if __name__ == "__main__":
    FIXTURES.write_text(json.dumps({spec: payload(spec) for spec in SPECS}, indent=1) + "\n")
