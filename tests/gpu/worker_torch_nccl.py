"""One rank of test_gpu_torch.py: torch's NCCL carries the tensors, all ranks on one GPU."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringlet.torch as hvd
from ringlet.job.session import current
from ringlet.torch.tensors.placement import place_of

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(gpu)
dist.init_process_group("nccl", device_id=gpu)
hvd.init(dist.group.WORLD)
rank, size = hvd.rank(), hvd.size()
assert current().transport == "torch-nccl"


def drawn(seed, *shape):
    """Return random numbers on the GPU, the same as on any other device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(gpu)


def same_everywhere(tensors, what):
    for i, tensor in enumerate(tensors):
        others = hvd.allgather(tensor.detach().cpu().reshape(1, -1), name=f"{what}.{i}")
        assert all(torch.equal(others[0], other) for other in others), (what, i)


x = drawn(rank, 300, 400)
assert place_of(x) == "cuda"
for spec in "none", "fp16", "int8", "topk(ratio=0.1)", "threshold", "onebit":
    here = hvd.allreduce(x, name=f"gpu.{spec}", compression=spec)
    there = hvd.allreduce(x.cpu(), name=f"host.{spec}", compression=spec)
    assert here.device == gpu
    assert torch.equal(here.cpu(), there), spec
uneven = drawn(rank, 5 + 3 * rank, 7)
for here, there in (
    (hvd.allgather(uneven), hvd.allgather(uneven.cpu())),
    (hvd.reducescatter(x[:9]), hvd.reducescatter(x[:9].cpu())),
    (hvd.broadcast(x > 0, 1), hvd.broadcast(x.cpu() > 0, 1)),
    (hvd.alltoall(x[: 4 * size]), hvd.alltoall(x[: 4 * size].cpu())),
):
    assert here.device == gpu
    assert torch.equal(here.cpu(), there)


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(100, 200), torch.nn.Tanh(), torch.nn.Linear(200, 50)
    return torch.nn.Sequential(*layers).to(gpu)


def train(wrapped, steps=4):
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    for step in range(steps):
        inner.zero_grad()
        wrapped(drawn(10 * step + rank, 16, 100)).square().mean().backward()
        inner.step()


def whole(sharded):
    return torch.cat([p.full_tensor().detach().flatten() for p in sharded.parameters()])


plain = DistributedDataParallel(model(), device_ids=[gpu.index])
train(plain)
expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
hooked = DistributedDataParallel(model(), device_ids=[gpu.index])
hooked.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
train(hooked)
same_everywhere(hooked.parameters(), "ddp")

for spec, gather in ("fp16", None), ("int8 | ef", "int8"), ("block_topk | ef", "fp8"):
    own = fully_shard(model())
    state = hvd.compress_fsdp(own, spec, gather=gather)
    train(own)
    saved = state.state_dict()
    state.load_state_dict(saved)
    train(own, 1)
    same_everywhere([whole(own)], f"fsdp.{spec}")
for spec in "none", "int8 | ef":
    own = FullyShardedDataParallel(model(), device_id=gpu, use_orig_params=True)
    hvd.compress_fsdp(own, spec)
    train(own)
    with FullyShardedDataParallel.summon_full_params(own):
        found = torch.cat([p.detach().flatten() for p in own.parameters()])
    same_everywhere([found], f"fsdp1.{spec}")
    if spec == "none":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
mesh = init_device_mesh("cuda", (size, 1), mesh_dim_names=("replicate", "shard"))
for spec in "none", "topk(ratio=0.3) | ef":
    own = fully_shard(model(), mesh=mesh["shard"])
    hvd.compress_hsdp(own, spec, mesh["replicate"].get_group())
    train(own)
    same_everywhere([whole(own)], f"hsdp.{spec}")
    if spec == "none":
        torch.testing.assert_close(whole(own), expected, rtol=1e-4, atol=1e-6)
hvd.shutdown()
dist.destroy_process_group()
print(f"rank {rank} is done")
