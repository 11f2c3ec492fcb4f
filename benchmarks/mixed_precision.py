"""What a half model costs to reduce: two streams, a fusion that breaks at every change, and DDP.

    ringlet run -np 2 --transport gloo python benchmarks/mixed_precision.py

A model with the parameters of ResNet-50 in mixed precision (convolutions in FP16, norms in FP32,
interleaved) and one with those of a transformer (half of them BF16). Each contender reduces the
gradients of one backward pass from the same hooks: Ringlet with its look-ahead, Ringlet that ends a
bucket wherever the type changes, and DistributedDataParallel over gloo. A fourth is Ringlet with
the reduction that policies have (16-bit values travel by a cast codec, and add up in float32; the
others leave that to the transport), a fifth no reduction at all. They take turns, a round
each; a time is that of the slowest rank, the figure the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from lookahead import resnet, transformer
from torch.nn.parallel import DistributedDataParallel

from ringlet.compressors import NoCompression
from ringlet.fusion import Engine, Limits, Request
from ringlet.precision.reduction import carrier
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.rendezvous.connect import connect
from ringlet.torch.tensors.views import flat

TWO, BROKEN, DDP = "two streams", "broken at every change", "DDP"
WIDE, FLOOR = "sums in float32", "no communication"


class Half(torch.nn.Module):
    """Parameters of a queue, of which backward produces all gradients, last declared first."""

    def __init__(self, queue: list[tuple[int, str]]) -> None:
        super().__init__()
        made = [
            torch.nn.Parameter(torch.ones(n, dtype=getattr(torch, dtype))) for n, dtype in queue
        ]
        self.parts = torch.nn.ParameterList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.parts:
            x = x + (p * p[:1]).sum().float()
        return x


class Streams:
    """A model whose gradients go to an engine of their own as they are produced."""

    def __init__(self, comm, queue, nbytes: int, lookahead=None, reduction="wire") -> None:
        limits = Limits(fusion_threshold=nbytes, lookahead=lookahead)
        self.engine = Engine(comm, open_control, limits)
        self.model = Half(queue)
        none = NoCompression()
        carried = [
            carrier(none, dtype, n, reduction, self.engine.sums_in_float32(dtype))
            for n, dtype in queue
        ]
        requests = [
            Request(
                f"t{i}", "allreduce", dtype, (n,), ReduceOp.AVERAGE, str(compressor), collective
            )
            for i, ((n, dtype), (compressor, collective)) in enumerate(
                zip(queue, carried, strict=True)
            )
        ]
        compressors = [compressor for compressor, _ in carried]
        self._group = self.engine.declare("model", requests, compressors, [{} for _ in requests])
        self.transactions = len(self._group.buckets)
        for request, p in zip(requests, self.model.parts, strict=True):
            p.register_post_accumulate_grad_hook(self._hook(request.name))

    def _hook(self, name: str):
        return lambda p: self._group.submit(name, flat(p.grad))

    def step(self) -> None:
        self.model(torch.zeros(())).backward()
        self._group.wait()

    def close(self) -> None:
        self.engine.shutdown()


class Reference:
    """The same model in DistributedDataParallel, as torch ships it."""

    def __init__(self, queue, megabytes: float) -> None:
        self.model = Half(queue)
        self._parallel = DistributedDataParallel(self.model, bucket_cap_mb=megabytes)
        self.transactions = 0

    def step(self) -> None:
        self._parallel(torch.zeros(())).backward()
        told = self._parallel._get_ddp_logging_data()
        sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
        self.transactions = len(sizes.split(","))

    def close(self) -> None:
        pass


class Alone:
    """The same model, and nobody to reduce with."""

    transactions = 0

    def __init__(self, queue) -> None:
        self.model = Half(queue)

    def step(self) -> None:
        self.model(torch.zeros(())).backward()

    def close(self) -> None:
        pass


def measured(comm, contenders, rounds: int) -> dict[str, float]:
    """Return the median seconds a step of each contender, the slowest rank's in each round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, contender in contenders.items():
            contender.model.zero_grad()
            comm.barrier()
            start = time.perf_counter()
            contender.step()
            worst = np.array([time.perf_counter() - start])
            comm.allreduce(worst, ReduceOp.MAX, "float64")
            if turn >= 2:  # DDP rebuilds its buckets after the first
                times[name].append(float(worst[0]))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12, help="of the transformer")
    parser.add_argument("--threshold-mb", type=float, default=25.0, help="of a bucket, DDP's too")
    options = parser.parse_args()
    nbytes = int(options.threshold_mb * (1 << 20))
    torch.set_num_threads(1)
    comm = connect(None)
    everyone = range(comm.size)
    first = comm.rank == 0
    store = (
        dist.TCPStore("127.0.0.1", 0, comm.size, True, wait_for_workers=False) if first else None
    )
    port = int(comm.broadcast_bytes(str(store.port).encode() if store else b""))
    store = store or dist.TCPStore("127.0.0.1", port, comm.size, False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    if first:
        print(f"{comm.size} ranks, transport {comm.name}, {options.rounds} rounds", flush=True)
    for name, queue in (("ResNet-50", resnet()), ("transformer", transformer(options.layers))):
        contenders = {
            TWO: Streams(comm.subset(everyone), queue, nbytes),
            BROKEN: Streams(comm.subset(everyone), queue, nbytes, 0),
            WIDE: Streams(comm.subset(everyone), queue, nbytes, None, "float32"),
            DDP: Reference(queue, options.threshold_mb),
            FLOOR: Alone(queue),
        }
        medians = measured(comm, contenders, options.rounds)
        for contender in contenders.values():
            contender.close()
        if first:
            print(f"{name}, {len(queue)} tensors:")
            for who, contender in contenders.items():
                ratio = medians[who] / medians[TWO]
                print(
                    f"  {who:<24}{contender.transactions:4d} transactions "
                    f"{medians[who] * 1e3:8.1f} ms  {ratio:5.2f} times {TWO}",
                    flush=True,
                )
    dist.destroy_process_group()
    comm.close()


if __name__ == "__main__":
    main()
