"""Local steps: ranks train alone and agree every 20 steps on what they have changed (DiLoCo).

ringlet run -np 2 python examples/local_steps.py --every 20
"""

import argparse

import torch
from sklearn.datasets import load_digits

import ringlet.torch as hvd


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=20, help="local steps between agreements")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DiLoCo(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model.named_parameters(),
        every=args.every,
        compression="int8 | ef",
    )
    own = torch.arange(hvd.rank(), 1500, hvd.size())
    shuffle = torch.Generator().manual_seed(hvd.rank())
    for _ in range(args.steps):
        batch = own[torch.randint(len(own), (32,), generator=shuffle)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()  # in every twentieth it communicates
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        each = hvd.stats().wire_bytes / args.steps
        print(f"accuracy {100 * accuracy:.1f} %, {each / 1e3:.1f} kB sent a step")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
