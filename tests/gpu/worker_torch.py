"""One rank of test_gpu_torch.py: torch tensors on a GPU over NCCL, all ranks on one GPU."""

import copy
import os

import torch

import ringlet.torch as hvd
from ringlet.torch.tensors.placement import place_of

hvd.init(transport="nccl")
rank, size = hvd.rank(), hvd.size()
gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(gpu)


def drawn(seed, *shape):
    """Return random numbers on the GPU, the same as on any other device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(gpu)


def same_everywhere(tensors, what):
    for i, tensor in enumerate(tensors):
        others = hvd.allgather(tensor.detach().cpu().reshape(1, -1), name=f"{what}.{i}")
        assert all(torch.equal(others[0], other) for other in others), (what, i)


x = drawn(rank, 300, 400)
assert place_of(x) == "cuda"

# Results are those of tensors in host memory, which gloo moves: sums of two are exact in any order.
for spec in ("none", "fp16", "bf16", "int8", "fp8", "topk(ratio=0.1)", "block_topk", "onebit"):
    here = hvd.allreduce(x, name=f"gpu.{spec}", compression=spec)
    there = hvd.allreduce(x.cpu(), name=f"host.{spec}", compression=spec)
    assert here.device == gpu
    assert torch.equal(here.cpu(), there), spec
for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool):
    some = (x * 8).to(dtype)
    op = hvd.Sum if dtype is torch.bool else hvd.Average
    here, there = hvd.allreduce(some, op=op), hvd.allreduce(some.cpu(), op=op)
    assert torch.equal(here.cpu(), there), dtype

# Operations whose results have a size of their own, in memory that the engine's stream asks for.
uneven = drawn(rank, 5 + 3 * rank, 7)
splits = torch.tensor([2, 3 + 3 * rank])
for some in uneven, uneven.bfloat16(), (uneven * 9).short(), uneven[: 5 * rank], uneven[:, ::2]:
    assert place_of(some, None) == "cuda"
    here, there = hvd.allgather(some), hvd.allgather(some.cpu())
    assert here.device == gpu
    assert torch.equal(here.cpu(), there)
moved, received = hvd.alltoall(uneven, splits)
there, told = hvd.alltoall(uneven.cpu(), splits)
assert moved.device == gpu
assert torch.equal(moved.cpu(), there)
assert received.tolist() == told.tolist()
for rows in 8, 9:
    for kind in {"op": hvd.Sum}, {"postscale_factor": 3.0}, {"compression": "bf16"}:
        some = drawn(rank, rows, 7)
        here, there = hvd.reducescatter(some, **kind), hvd.reducescatter(some.cpu(), **kind)
        assert here.device == gpu
        assert torch.equal(here.cpu(), there), (rows, kind)
late = []
for turn in range(20):  # results that are dropped before torch's stream has read them
    busy = x
    for _ in range(20):
        busy = torch.tanh(busy @ busy.t() @ busy)
    arrived = hvd.allgather(torch.full((1000, 1000), float(turn), device=gpu))
    late.append(0 * busy.sum() + arrived)
    del arrived
assert all((each == turn).all().item() for turn, each in enumerate(late))
del late, busy

word = torch.full((5,), float(rank), device=gpu)
hvd.broadcast_(word, 1)
assert word.tolist() == [1.0] * 5

# The engine's stream waits for torch's, and torch's for the engine's, while both are busy.
for turn in range(20):
    y = x
    for _ in range(20):
        y = torch.tanh(y @ y.t() @ y)
    y = torch.full_like(y, turn + rank) + 0 * y
    total = hvd.allreduce_(y, name="busy", op=hvd.Sum)
    assert total.sum().item() == y.numel() * (2 * turn + 1)
    del y, total

for spec in ("none", "int8 | ef", "topk(ratio=0.05) | ef", "powersgd(rank=2) | ef", "threshold"):
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 50)
    ).to(gpu)
    hvd.broadcast_parameters(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=spec)

    def train(numbers, model=model, optimizer=optimizer):
        for step in numbers:
            optimizer.zero_grad()
            model(drawn(10 * step + rank, 16, 100)).square().mean().backward()
            optimizer.step()

    train(range(4))
    same_everywhere(model.parameters(), spec)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    train(range(4, 6))
    ended = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(kept)
    optimizer.load_state_dict(saved)
    train(range(4, 6))
    assert all(torch.equal(a, b) for a, b in zip(ended, model.parameters(), strict=True)), spec
    optimizer.residual_norm()

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(300, 200).to(gpu)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu.index])
model.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
inner = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    inner.zero_grad()
    model(drawn(10 * step + rank, 16, 300)).square().mean().backward()
    inner.step()
same_everywhere(model.parameters(), "ddp")
torch.distributed.destroy_process_group()
hvd.shutdown()
print(f"rank {rank} is done")
