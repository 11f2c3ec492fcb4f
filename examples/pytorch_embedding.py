"""Train a model whose embedding has sparse gradients: its rows travel as indices and values.

ringlet run -np 2 python examples/pytorch_embedding.py
"""

import argparse

import torch
from torch import nn

import ringlet.torch as hvd


class Recommender(nn.Module):
    """Scores pairs of a user and an item."""

    def __init__(self, users=20_000, items=5_000, width=32):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.items = nn.Embedding(items, width, sparse=True)
        self.mix = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users, items):
        both = torch.cat([self.users(users), self.items(items)], 1)
        return self.mix(both).squeeze(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compression", default="int8 | ef", metavar="SPEC")
    parser.add_argument("--sparse-as-dense", action="store_true", help="to see what that costs")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=args.compression,
        sparse_as_dense=args.sparse_as_dense,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    numbers = torch.Generator().manual_seed(hvd.rank())
    first = last = None
    for _ in range(args.steps):
        users = torch.randint(0, 200, (64,), generator=numbers)  # few are active at a time
        items = torch.randint(0, 100, (64,), generator=numbers)
        wanted = (users % 2 == 0).float()
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), wanted)
        loss.backward()
        optimizer.step()
        last = hvd.allreduce(loss.detach(), name="loss").item()
        first = last if first is None else first
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        print(f"loss {first:.3f} -> {last:.3f}")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
