"""Compress what FSDP2 exchanges, gradients and parameters: one more line.

torchrun --nproc-per-node 2 examples/pytorch_fsdp2.py --compression int8 --gather int8
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import ringlet.torch as hvd


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="int8", metavar="SPEC")
    parser.add_argument("--gather", default="int8", metavar="SPEC", help="of parameters")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                          nn.Linear(512, 10))  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    hvd.compress_fsdp(model, args.compression, gather=args.gather)  # the line that Ringlet adds
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * dist.get_world_size())
    own = torch.arange(dist.get_rank(), 1500, dist.get_world_size())
    shuffle = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(args.steps):
        rows = own[torch.randint(len(own), (32,), generator=shuffle)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    if dist.get_rank() == 0:
        print(
            f"accuracy {100 * accuracy:.1f} % with {args.compression!r}, "
            f"parameters gathered as {args.gather!r}"
        )
    dist.barrier()  # gloo's threads must have let go of FSDP's tensors before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
