"""Ranks that run out of data while exchanges of theirs are still under way."""

import random

import numpy as np
import pytest

from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.planning import pieces
from ringlet.ring import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

SPECS = ["none", "int8(bucket=64)", "int8(bucket=64) | ef", "fp16", "topk(ratio=0.9)"]


@pytest.mark.parametrize("seed", range(3))
def test_others_go_on_with_groups_and_single_tensors(seed, monkeypatch):
    """Sums count the ranks that are left, and nobody waits, however fast steps follow."""
    monkeypatch.setattr(pieces, "PIECE", 30_000)
    shared = random.Random(seed)
    sizes = [shared.choice([300, 20_000, 90_000]) for _ in range(5)]
    specs = [shared.choice(SPECS) for _ in sizes]
    epochs = [[shared.randint(1, 6) for _ in range(3)] for _ in range(12)]

    def body(comm):
        engine, own = Engine(comm, open_control, Limits(fusion_threshold=1 << 17)), random.Random()
        try:
            requests = [
                Request(f"w{i}", shape=(n,), spec=spec)
                for i, (n, spec) in enumerate(zip(sizes, specs, strict=True))
            ]
            group = engine.declare("g", requests, list(map(parse, specs)), [{} for _ in specs])
            for steps in epochs:
                pending = []
                for step in range(steps[comm.rank]):
                    left = sum(n > step for n in steps)
                    for i in own.sample(range(5), 5):
                        group.submit(f"w{i}", np.ones(sizes[i], np.float32))
                    for n in (200, 30_000, 120_000):
                        request = Request(f"s{n}", shape=(n,), op=ReduceOp.SUM)
                        pending.append((engine.submit(request, np.ones(n, np.float32)), left))
                    group.wait(60)
                    if step + 1 < steps[comm.rank]:  # the last ones are under way when it joins
                        for handle, wanted in pending:
                            np.testing.assert_array_equal(handle.wait(60), wanted)
                        pending.clear()
                engine.join()
                for handle, wanted in pending:
                    np.testing.assert_array_equal(handle.wait(60), wanted)
        finally:
            engine.shutdown()
        return True

    assert all(run_local(body, 3))
