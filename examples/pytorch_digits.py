"""Train a small CNN on scikit-learn's handwritten digits, data-parallel, with compressed gradients.

    ringlet run -np 4 python examples/pytorch_digits.py --compression "topk(ratio=0.01) | ef"

Every rank trains on its own quarter of the images. At the end rank 0 prints the accuracy on
held-out images, whether all replicas hold the same bits, and what compression saved and cost.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import ringlet.torch as hvd


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="none", metavar="SPEC", help="default: none")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.0125, help="per rank; scaled by their number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the summary to this file")
    return parser.parse_args()


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def load_data(seed):
    """Return training and held-out (images, labels), the same on every rank."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    split = train_test_split(
        images, digits.target, test_size=0.25, random_state=seed, stratify=digits.target
    )
    train_x, test_x, train_y, test_y = map(torch.from_numpy, split)
    return (train_x, train_y), (test_x, test_y)


def train(model, optimizer, data, args):
    images, labels = data
    own = torch.arange(hvd.rank(), len(images), hvd.size())
    per_epoch = len(images) // hvd.size() // args.batch_size  # the same number on every rank
    steps = args.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr * hvd.size(), total_steps=steps, pct_start=0.2
    )
    shuffle = torch.Generator().manual_seed(args.seed + hvd.rank())
    for _ in range(args.epochs):
        order = own[torch.randperm(len(own), generator=shuffle)]
        for step in range(per_epoch):
            batch = order[step * args.batch_size : (step + 1) * args.batch_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    return steps


def summarise(model, optimizer, steps, seconds, test, spec):
    """Return what rank 0 prints; every rank takes part."""
    images, labels = test
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).double().mean()
    counted = hvd.stats()
    residual = hvd.allreduce(torch.tensor(optimizer.residual_norm() ** 2), op=hvd.Sum).sqrt()
    return {
        "compression": spec,
        "workers": hvd.size(),
        "steps": steps,
        "accuracy": 100 * correct.item(),
        "replicas_equal": hvd.replicas_equal(model.state_dict()),
        "seconds": seconds,
        "residual_norm": residual.item(),
        **counted.as_dict(),
    }


def print_summary(s):
    print(f"compression             {s['compression']} on {s['workers']} workers")
    print(f"accuracy (held out)     {s['accuracy']:.2f} %")
    print(f"replicas bit-equal      {'yes' if s['replicas_equal'] else 'NO'}")
    print(f"training time           {s['seconds']:.2f} s for {s['steps']} steps")
    print(f"raw bytes per rank      {s['raw_bytes'] / 1e6:.2f} MB")
    print(f"wire bytes per rank     {s['wire_bytes'] / 1e6:.2f} MB")
    print(f"ratio                   {s['ratio']:.1f}")
    print(f"compress                {s['compress_s']:.3f} s")
    print(f"communicate             {s['communicate_s']:.3f} s")
    print(f"decompress              {s['decompress_s']:.3f} s")
    print(f"final residual norm     {s['residual_norm']:.4f}")


def main():
    args = parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data, test = load_data(args.seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=args.compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.reset_stats()
    start = time.perf_counter()
    steps = train(model, optimizer, data, args)
    seconds = time.perf_counter() - start
    summary = summarise(model, optimizer, steps, seconds, test, args.compression)
    if hvd.rank() == 0:
        print_summary(summary)
        if args.json:
            args.json.write_text(json.dumps(summary))
    hvd.shutdown()


if __name__ == "__main__":
    main()
