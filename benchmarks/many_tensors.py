"""Processor time of a step of a model with many small tensors: Ringlet beside DDP.

    ringlet run -np 2 python benchmarks/many_tensors.py [--tensors 300] [--elements 2304]
    ringlet run -np 2 python benchmarks/many_tensors.py --rows 64 --specs "powersgd | ef"

Every rank trains the same model in turns: without communication, in DistributedDataParallel over
gloo, as it is and with torch's hook of float16, and with ``DistributedOptimizer`` and each spec.
Matrices (``--rows``) are reduced by DDP with torch's hook of PowerSGD too, in one bucket: over gloo
it takes one bucket's factors for another's.
What is told is the processor time of a step on rank 0 in milliseconds, of all threads and of the
main one, as medians over turns, and what it is of DDP's in the same turn. The arithmetic is small,
so that what each tensor costs shows. Ranks share hosts, so wire time does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ringlet.torch as hvd

WARM_UP = 10
SPECS = ["none", "fp16", "bf16", "int8 | ef", "int4 | ef", "onebit | ef", "topk(ratio=0.01) | ef"]
HOOK = "DDP fp16"  # torch has a hook of bfloat16 for NCCL alone
LOW_RANK = "DDP powerSGD"
RANK = 4  # of LOW_RANK, and of our own by default


class Small(torch.nn.Module):
    """So many tensors; the sum of their squares is the loss."""

    def __init__(self, tensors: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values = [torch.randn(shape, generator=generator) for _ in range(tensors)]
        self.weights = torch.nn.ParameterList(map(torch.nn.Parameter, values))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """Return the loss times ``factor``."""
        return factor * sum(weight.square().sum() for weight in self.weights)


def stepping(way: str, tensors: int, shape: tuple[int, ...]) -> Callable[[], None]:
    """Return what takes a step of ``way``: "alone", "DDP", one with a hook, or a spec."""
    model: torch.nn.Module = Small(tensors, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    if way in ("DDP", HOOK, LOW_RANK):
        group, usual = torch.distributed, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
        if way == LOW_RANK:
            group._DEFAULT_FIRST_BUCKET_BYTES = 1 << 32
        cap = 1 << 12 if way == LOW_RANK else None
        model = wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap)
        group._DEFAULT_FIRST_BUCKET_BYTES = usual
        if way == HOOK:
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if way == LOW_RANK:
            state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != "alone":
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=way)
    factor = torch.tensor(1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(factor).backward()
        optimizer.step()

    return step


def main() -> None:
    """Train in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--elements", type=int, default=2304, help="of each tensor")
    parser.add_argument("--rows", type=int, help="of each, which is a matrix then")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--specs", nargs="+", default=SPECS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(Path(folder) / "ddp"), hvd.size())
    torch.distributed.init_process_group(
        "gloo", store=store, rank=hvd.rank(), world_size=hvd.size()
    )
    peers = ["DDP", HOOK, *([LOW_RANK] if given.rows else [])]
    ways = ["alone", *peers, *given.specs]
    shape = (given.rows, given.elements // given.rows) if given.rows else (given.elements,)
    steps = {way: stepping(way, given.tensors, shape) for way in ways}
    spent: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(given.turns + 1):
        for way, step in steps.items():
            hvd.barrier()
            count = given.steps if turn else WARM_UP
            whole, main_thread = time.process_time(), time.thread_time()
            for _ in range(count):
                step()
            both = time.process_time() - whole, time.thread_time() - main_thread
            if turn:
                spent[way].append((both[0] / count * 1e3, both[1] / count * 1e3))
    if hvd.rank() == 0:
        print(f"{given.tensors} tensors of {list(shape)}, {hvd.size()} ranks: processor ms a step")
        for way, found in spent.items():
            every, own = (statistics.median(column) for column in zip(*found, strict=True))
            told = f"{way:21} all threads {every:6.2f}, the main one {own:6.2f}"
            for peer in peers if way in given.specs else ():
                ratios = [a[0] / b[0] for a, b in zip(found, spent[peer], strict=True)]
                told += f", {statistics.median(ratios):.2f} of {peer}"
            print(told)
    torch.distributed.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
