"""What the fusion engine itself costs: many small tensors, and a ResNet's gradients.

    ringlet run -np 2 python benchmarks/engine.py
    ringlet run -np 2 --transport gloo python benchmarks/engine.py

Prints, by medians over interleaved rounds and the slowest rank: microseconds a tensor from submit
to completion for 1000 tensors of 1 KB; control bytes of a steady step, sent and heard; how often
the engine's thread wakes up, which costs up to Python's switch interval; processor time while idle;
and 161 gradients of ResNet-50's sizes, with ranks comparing their sums and without, beside mpi4py
(concatenate, Allreduce, split) or torch's gloo (DDP's 25 MB buckets) in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np

from ringlet.fusion import Request
from ringlet.job.session import init
from ringlet.ring.communicator import ReduceOp


def resnet_sizes() -> list[int]:
    """Return the numbers of elements of ResNet-50's 161 parameters, first layer first."""
    sizes = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = width * 4
            sizes += [channels * width, width, width, width * width * 9, width, width]
            sizes += [width * out, out, out]
            if block == 0:
                sizes += [channels * out, out, out]
            channels = out
    return [*sizes, 2048 * 1000, 1000]


def slowest(runtime, seconds: float) -> float:
    """Return the longest time that a rank took."""
    worst = np.array([seconds])
    runtime.engine.submit(
        Request("slowest", dtype="float64", shape=(1,), op=ReduceOp.MAX), worst
    ).wait()
    return float(worst[0])


class Traffic:
    """Counts what a rank's engine says and hears, and how often its thread wakes up."""

    def __init__(self, engine) -> None:
        self.sent = self.heard = self.woken = 0
        control, announcements = engine._control, engine._loop._announcements
        send, listen, following = control.send, announcements.listen, announcements.next

        def counted_send(message):
            self.sent += len(message)
            send(message)

        def counted_listen(patience):
            self.woken += 1
            listen(patience)

        def counted_next():
            message = following()
            self.heard += len(message or b"")
            return message

        control.send, announcements.listen, announcements.next = (
            counted_send,
            counted_listen,
            counted_next,
        )

    def now(self) -> np.ndarray:
        """Return what was counted so far."""
        return np.array([self.sent, self.heard, self.woken], np.float64)


def most(runtime, counts: np.ndarray) -> np.ndarray:
    """Return the largest counts of a rank."""
    worst = counts.copy()
    request = Request("most", dtype="float64", shape=(counts.size,), op=ReduceOp.MAX)
    runtime.engine.submit(request, worst).wait()
    return worst


def small_tensors(runtime, traffic, count: int, rounds: int) -> tuple[float, np.ndarray]:
    """Return microseconds a tensor, and what a step was counted to need, in the steady state."""
    requests = [Request(f"small.{i}", shape=(256,), op=ReduceOp.SUM) for i in range(count)]
    arrays = [np.ones(256, np.float32) for _ in requests]
    times, counts = [], []
    for _ in range(rounds + 5):
        runtime.engine.submit(Request("start", "barrier"), np.empty(0, np.float32)).wait()
        start, before = time.perf_counter(), traffic.now()
        submit = runtime.engine.submit
        handles = [submit(r, a) for r, a in zip(requests, arrays, strict=True)]
        for handle in handles:
            handle.wait()
        seconds = time.perf_counter() - start
        counts.append(traffic.now() - before)
        times.append(slowest(runtime, seconds))
    steady = most(runtime, np.median(counts[5:], axis=0))
    return statistics.median(times[5:]) / count * 1e6, steady


def idle_share(seconds: float) -> float:
    """Return the share of one core that this process uses while nothing is asked of it."""
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds


def peers(runtime):
    """Return what reduces a list of arrays without Ringlet, by name."""
    if runtime.transport == "mpi":
        from mpi4py import MPI

        def with_mpi(arrays, buffer=[]):  # noqa: B006 - the buffer is kept on purpose
            if not buffer:
                buffer.append(np.empty(sum(a.size for a in arrays), np.float32))
            np.concatenate(arrays, out=buffer[0])
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer[0])
            start = 0
            for a in arrays:
                a[:] = buffer[0][start : start + a.size]
                start += a.size

        return {"mpi4py, one buffer": with_mpi}
    import tempfile

    import torch
    import torch.distributed as dist

    from ringlet.job.objects import broadcast_object

    place = broadcast_object(tempfile.mkdtemp() if runtime.rank == 0 else None)
    dist.init_process_group(
        "gloo", f"file://{place}/store", rank=runtime.rank, world_size=runtime.size
    )

    def with_gloo(arrays):
        """Reduce as DDP does: 25 MB buckets, all in flight."""
        buckets, size = [[]], 0
        for a in reversed(arrays):
            if size + a.nbytes > 25 << 20:
                buckets.append([])
                size = 0
            buckets[-1].append(a)
            size += a.nbytes
        flying = []
        for bucket in buckets:
            flat = torch.from_numpy(np.concatenate(bucket))
            flying.append((dist.all_reduce(flat, async_op=True), flat, bucket))
        for work, flat, bucket in flying:
            work.wait()
            start = 0
            for a in bucket:
                a[:] = flat[start : start + a.size].numpy()
                start += a.size

    return {"torch gloo, DDP's buckets": with_gloo}


def resnet(runtime, rounds: int) -> dict[str, float]:
    """Return seconds by way of reducing 161 gradients."""
    arrays = [np.ones(n, np.float32) for n in resnet_sizes()]
    requests = [
        Request(f"resnet.{i}", shape=(a.size,), op=ReduceOp.SUM) for i, a in enumerate(arrays)
    ]
    group = runtime.engine.declare("resnet", requests, [_NONE] * len(arrays), [{} for _ in arrays])

    def with_ringlet(arrays):
        for request, a in zip(reversed(requests), reversed(arrays), strict=True):
            group.submit(request.name, a)
        group.wait()

    def comparing(share):
        def reduce(arrays):
            for bucket in group.buckets:
                bucket.verify = share
            with_ringlet(arrays)

        return reduce

    ways = {
        "ringlet": comparing(runtime.engine.limits.share),
        "ringlet, all sums compared": comparing(1),
        "ringlet, sums not compared": comparing(0),
    } | peers(runtime)
    times: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # nobody always comes after the same way; all ranks in one order
        for name, way in order:
            runtime.engine.submit(Request("start", "barrier"), np.empty(0, np.float32)).wait()
            start = time.perf_counter()
            way(arrays)
            times[name].append(slowest(runtime, time.perf_counter() - start))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    runtime = init()
    traffic = Traffic(runtime.engine)
    each, steady = small_tensors(runtime, traffic, options.tensors, options.rounds)
    idle = slowest(runtime, idle_share(3.0))
    ways = resnet(runtime, options.rounds)
    if runtime.rank == 0:
        print(f"{runtime.size} ranks, transport {runtime.transport}")
        print(f"{options.tensors} tensors of 1 KB: {each:.2f} us a tensor")
        sent, heard, woken = steady
        print(
            f"a step of them: {sent:.0f} control bytes sent, {heard:.0f} heard, {woken:.0f} wakes"
        )
        print(f"idle: {100 * idle:.2f} % of a core")
        for name, seconds in ways.items():
            ratio = seconds / ways["ringlet"]
            print(f"161 gradients, {name}: {seconds * 1e3:.1f} ms ({ratio:.2f} of ringlet's time)")
    runtime.close()


if __name__ == "__main__":
    from ringlet.compressors import NoCompression

    _NONE = NoCompression()
    main()
