"""In the calls of Horovod's pytorch_synthetic_benchmark.py, with a smaller model."""

import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812 - as scripts call it

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    op=hvd.Adasum if hvd.size() < 0 else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(8, 3, 4, 4), torch.LongTensor(8).random_() % 1000
losses = []


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


timeit.timeit(benchmark_step, number=2)
seconds = timeit.timeit(benchmark_step, number=8)
if hvd.rank() == 0:
    print(f"Img/sec per process: {8 * 8 / seconds:.1f}")
variables = list(model.parameters())
