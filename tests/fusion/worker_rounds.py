"""Reduces many buckets of rounds for some steps: one rank's part of a job.

Buckets are under way at the same time, and their sums are larger than what all ranks gather. Prints
a hash of the results, and how far they are from the mean.
"""

import hashlib
import sys

import numpy as np

from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.job.session import init

SHAPES = [(512, 300), (3000, 40), (256, 256), (70,), (64, 96), (2000,), (1200, 90)] * 3

spec = sys.argv[1]
runtime = init()
requests = [Request(f"w{i}", shape=shape, spec=spec) for i, shape in enumerate(SHAPES)]
states = [{} for _ in requests]
group = runtime.engine.declare("g", requests, [parse(spec)] * len(requests), states)
hashed, farthest = hashlib.sha256(), 0.0
for step in range(12):
    draws = [
        [np.random.default_rng([step, rank, i]).standard_normal(r.numel, np.float32)
         for i, r in enumerate(requests)]
        for rank in range(runtime.size)
    ]  # fmt: skip
    own = draws[runtime.rank]
    means = [np.mean(column, axis=0, dtype=np.float64) for column in zip(*draws, strict=True)]
    for request, values in zip(requests, own, strict=True):
        group.submit(request.name, values)
    group.wait(60)
    for values, mean in zip(own, means, strict=True):
        hashed.update(values.tobytes())
        farthest = max(farthest, float(np.linalg.norm(values - mean) / np.linalg.norm(mean)))
print(f"hash {hashed.hexdigest()}, buckets {len(group.buckets)}, error {farthest:.3f}", flush=True)
runtime.close()
