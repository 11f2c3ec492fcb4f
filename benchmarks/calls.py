"""What the public calls cost: many small tensors through torch's and TensorFlow's functions.

    ringlet run -np 2 python benchmarks/calls.py
    ringlet run -np 2 --transport gloo python benchmarks/calls.py
    ringlet run -np 2 python benchmarks/calls.py --framework tensorflow

Prints microseconds a tensor from the first call to the last result, by medians over rounds and the
slowest rank, beside the engine's own ``submit`` and a peer in the same run: mpi4py's ``Iallreduce``
or torch.distributed's ``all_reduce(async_op=True)`` over gloo, a call a tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from ringlet.fusion import Request
from ringlet.job.objects import broadcast_object
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp

ELEMENTS = 256  # float32: 1 KB
TURNS = 3  # of all ways, so that a busy while of the machine does not meet one way alone
WARM_UP = 3  # rounds: the ways' names together are more than the engine's cache has room for

Way = Callable[[], None]


def with_engine(count: int) -> Way:
    """Return what submits requests that were made once: what the calls are built on."""
    submit = current().engine.submit
    arrays = [np.ones(ELEMENTS, np.float32) for _ in range(count)]
    requests = [Request(f"engine.{i}", shape=(ELEMENTS,), op=ReduceOp.SUM) for i in range(count)]

    def way() -> None:
        for handle in [submit(r, a) for r, a in zip(requests, arrays, strict=True)]:
            handle.wait()

    return way


def with_torch(count: int) -> dict[str, Way]:
    """Return torch's calls, by name."""
    import torch

    import ringlet.torch as hvd

    tensors = [torch.ones(ELEMENTS) for _ in range(count)]
    names = [f"torch.{i}" for i in range(count)]

    def named() -> None:
        handles = [
            hvd.allreduce_async_(t, name=n, op=hvd.Sum) for t, n in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def fresh() -> None:
        handles = [hvd.allreduce_async(t, name=n) for t, n in zip(tensors, names, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    def unnamed() -> None:
        for handle in [hvd.allreduce_async_(t, op=hvd.Sum) for t in tensors]:
            hvd.synchronize(handle)

    def compressed() -> None:
        handles = [
            hvd.allreduce_async_(t, name=n, op=hvd.Sum, compression="fp16")
            for t, n in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def grouped() -> None:
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, name="torch.group", op=hvd.Sum))

    return {
        "torch, allreduce_async_ by name": named,
        "torch, allreduce_async by name, new tensors": fresh,
        "torch, allreduce_async_ without names": unnamed,
        "torch, allreduce_async_ by name, fp16": compressed,
        "torch, grouped_allreduce_async_": grouped,
    }


def with_tensorflow(count: int) -> dict[str, Way]:
    """Return TensorFlow's calls, by name."""
    import tensorflow as tf

    import ringlet.tensorflow as hvd

    tensors = [tf.ones(ELEMENTS) for _ in range(count)]

    def grouped() -> None:
        hvd.grouped_allreduce(tensors, op=hvd.Sum, name="tf.group")

    @tf.function
    def graph(*given):  # type: ignore[no-untyped-def]
        return [hvd.allreduce(t, op=hvd.Sum, name=f"tf.{i}") for i, t in enumerate(given)]

    @tf.function
    def grouped_graph(*given):  # type: ignore[no-untyped-def]
        return hvd.grouped_allreduce(list(given), op=hvd.Sum, name="tf.graph.group")

    return {
        "tensorflow, grouped_allreduce": grouped,
        "tensorflow, allreduce by name in a graph": lambda: graph(*tensors),
        "tensorflow, grouped_allreduce in a graph": lambda: grouped_graph(*tensors),
    }


def peer(count: int) -> tuple[str, Way]:
    """Return what reduces the same tensors without Ringlet, a call a tensor."""
    runtime = current()
    if runtime.transport == "mpi":
        from mpi4py import MPI

        arrays = [np.ones(ELEMENTS, np.float32) for _ in range(count)]

        def with_mpi() -> None:
            world = MPI.COMM_WORLD
            MPI.Request.Waitall([world.Iallreduce(MPI.IN_PLACE, array) for array in arrays])

        return "mpi4py, Iallreduce", with_mpi
    import tempfile

    import torch
    import torch.distributed as dist

    place = broadcast_object(tempfile.mkdtemp() if runtime.rank == 0 else None)
    dist.init_process_group(
        "gloo", f"file://{place}/store", rank=runtime.rank, world_size=runtime.size
    )
    tensors = [torch.ones(ELEMENTS) for _ in range(count)]

    def with_gloo() -> None:
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    return "torch.distributed over gloo, all_reduce", with_gloo


def slowest(seconds: float) -> float:
    """Return the longest time that a rank took."""
    worst = np.array([seconds])
    request = Request("slowest", dtype="float64", shape=(1,), op=ReduceOp.MAX)
    current().engine.submit(request, worst).wait()
    return float(worst[0])


def measured(way: Way, rounds: int) -> list[float]:
    """Return the seconds that the slowest rank took, by round."""
    times = []
    for _ in range(WARM_UP + rounds):
        current().engine.submit(Request("start", "barrier"), np.empty(0, np.float32)).wait()
        start = time.perf_counter()
        way()
        times.append(slowest(time.perf_counter() - start))
    return times


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch")
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.framework == "torch":
        import ringlet.torch as hvd
    else:
        import ringlet.tensorflow as hvd
    hvd.init()
    count = options.tensors
    ways = {"engine, submit": with_engine(count)}
    ways |= with_torch(count) if options.framework == "torch" else with_tensorflow(count)
    ways |= dict([peer(count)])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            times[name] += measured(way, options.rounds)[WARM_UP:]
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, transport {current().transport}, {count} tensors of 1 KB")
        steady = {name: statistics.median(seconds) for name, seconds in times.items()}
        for name, seconds in steady.items():
            ratio = seconds / steady["engine, submit"]
            print(f"{seconds / count * 1e6:7.2f} us a tensor ({ratio:5.2f} x): {name}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
