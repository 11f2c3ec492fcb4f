"""What the look-ahead buys: collectives and time of a mixed-precision queue, with and without.

    ringlet run -np 2 python benchmarks/lookahead.py
    ringlet run -np 2 --transport gloo python benchmarks/lookahead.py --latency-ms 1

The queue is that of ResNet-50 in mixed precision: the 53 convolutions and the classifier in FP16,
normalisation and biases in FP32, interleaved as backward produces them, plus a transformer's with
half of its layers in BF16. ``--latency-ms`` is added to every collective, as a network would.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ringlet.compressors import NoCompression
from ringlet.fusion import Engine, Limits, Request
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.rendezvous.connect import connect


def resnet() -> list[tuple[int, str]]:
    """Return (elements, dtype) of ResNet-50's parameters, first layer first."""
    queue = [(64 * 3 * 49, "float16"), (64, "float32"), (64, "float32")]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = width * 4
            convolutions = [channels * width, width * width * 9, width * out]
            norms = [width, width, out]
            if block == 0:
                convolutions.append(channels * out)
                norms.append(out)
            for n, m in zip(convolutions, norms, strict=True):
                queue += [(n, "float16"), (m, "float32"), (m, "float32")]
            channels = out
    return [*queue, (2048 * 1000, "float16"), (1000, "float32")]


def transformer(layers: int = 12, width: int = 512) -> list[tuple[int, str]]:
    """Return (elements, dtype) of a transformer whose attention is BF16, norms and biases FP32."""
    layer = []
    for n in (3 * width * width, width * width, 4 * width * width, 4 * width * width):
        layer += [(n, "bfloat16"), (width, "float32")]
    return [*(layer + [(width, "float32")] * 4) * layers]


def run(comm, queue, lookahead: int | None, threshold: int, rounds: int) -> tuple[int, float]:
    """Return (collectives a step, median seconds a step of the slowest rank)."""
    engine = Engine(comm, open_control, Limits(fusion_threshold=threshold, lookahead=lookahead))
    requests = [
        Request(f"t{i}", dtype=dtype, shape=(n,), op=ReduceOp.SUM)
        for i, (n, dtype) in enumerate(queue)
    ]
    arrays = [np.ones(r.numel, r.storage) for r in requests]
    none = NoCompression()
    group = engine.declare("queue", requests, [none] * len(requests), [{} for _ in requests])
    times = []
    for _ in range(rounds):
        engine.submit(Request("start", "barrier"), np.empty(0, np.float32)).wait()
        engine.reset_stats()
        start = time.perf_counter()
        for request, array in zip(reversed(requests), reversed(arrays), strict=True):
            group.submit(request.name, array)
        group.wait()
        worst = np.array([time.perf_counter() - start])
        slowest = Request("slowest", dtype="float64", shape=(1,), op=ReduceOp.MAX)
        buckets = engine.stats.buckets
        times.append(float(engine.submit(slowest, worst).wait()[0]))
    engine.shutdown()
    return buckets, statistics.median(times[2:])


class Slow:
    """A communicator whose allreduce takes longer by a fixed time."""

    def __init__(self, inner, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def allreduce(self, *args, **options):
        self._inner.allreduce(*args, **options)
        time.sleep(self._seconds)


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--threshold-mb", type=float, default=16.0)
    options = parser.parse_args()
    comm = connect(None)
    threshold = int(options.threshold_mb * (1 << 20))
    if comm.rank == 0:
        print(f"{comm.size} ranks, transport {comm.name}, {options.latency_ms} ms added")
    for name, queue in (("ResNet-50", resnet()), ("transformer", transformer())):
        found = {}
        for lookahead in (0, None):
            slow = Slow(comm, options.latency_ms / 1e3) if options.latency_ms else comm
            found[lookahead] = run(slow, queue, lookahead, threshold, options.rounds)
        if comm.rank == 0:
            (without, slow_s), (with_, fast_s) = found[0], found[None]
            print(
                f"{name}, {len(queue)} tensors: {without} collectives and {slow_s * 1e3:.1f} ms "
                f"without look-ahead, {with_} and {fast_s * 1e3:.1f} ms with it "
                f"({slow_s / fast_s:.2f} times faster)"
            )
    comm.close()


if __name__ == "__main__":
    main()
