"""In the calls of Horovod's pytorch_mnist.py."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812 - as scripts call it
from horovod.torch.mpi_ops import Average

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
images = torch.randn(256, 1, 28, 28)
labels = (images[:, 0, :, :14].sum((1, 2)) > 0).long()
dataset = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 4, kernel_size=5)
        self.fc1 = torch.nn.Linear(4 * 12 * 12, 10)

    def forward(self, x):
        return F.log_softmax(self.fc1(F.relu(F.max_pool2d(self.conv1(x), 2)).flatten(1)), 1)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    op=Average,
    gradient_predivide_factor=1.0,
)
losses = []
for epoch in range(3):
    model.train()
    sampler.set_epoch(epoch)
    total = torch.tensor(0.0)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    losses.append(hvd.allreduce(total / len(loader), name="avg_loss").item())
variables = list(model.parameters())
