"""Compress inside DistributedDataParallel: one more line.

torchrun --nproc-per-node 2 examples/pytorch_ddp.py --compression "powersgd(rank=4) | ef"
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringlet.torch as hvd


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="powersgd(rank=4) | ef", metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=25, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                          nn.Linear(256, 10))  # fmt: skip
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*hvd.ddp_hook(args.compression))  # the line that Ringlet adds
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    equal = hvd.replicas_equal(model.state_dict())
    if dist.get_rank() == 0:
        stats = hvd.stats()
        print(f"accuracy {100 * accuracy:.1f} %, {stats.ratio:.1f} times fewer bytes sent")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
