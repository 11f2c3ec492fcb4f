"""Train digits in 16 bits with float32 masters, compressed.

ringlet run -np 2 python examples/pytorch_mixed_precision.py --precision "fp16(init=1024)"
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import ringlet.torch as hvd


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16", metavar="POLICY")
    parser.add_argument("--compression", metavar="SPEC", help="default: the policy's own wire")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256), nn.LayerNorm(256),
        nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # in float32, before the masters
    model = hvd.apply_precision(model, args.precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), args.compression, precision=args.precision
    )
    own = torch.arange(hvd.rank(), 1500, hvd.size())
    shuffle = torch.Generator().manual_seed(hvd.rank())
    for _ in range(args.steps):
        rows = own[torch.randint(len(own), (32,), generator=shuffle)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.scale(loss).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        print(f"accuracy {100 * accuracy:.1f} % in {args.precision}")
        print(f"loss scale {optimizer.loss_scale:g}, {optimizer.skipped_steps} steps skipped")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
