"""Train two small models with each compressor on 4 in-process workers; compare final quality.

    python examples/convergence.py                      # every compressor, both tasks
    python examples/convergence.py --tasks digits int8 "topk | ef"

Digits: a CNN on scikit-learn's images, accuracy on held-out ones (higher is better). Bytes: a
two-layer transformer on the sources of Python's standard library, nats per byte on held-out text
(lower is better). The compressors see the same data in the same order.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import ringlet
import ringlet.torch as hvd

WORKERS = 4
DEFAULT = [
    "none", "fp16", "bf16", "int8", "int4", "int4 | ef", "int4(stochastic=True)",
    "minmax(bits=2) | ef", "qsgd", "topk(ratio=0.01)", "topk(ratio=0.01) | ef",
    "topk(ratio=0.01) | int8 | ef",
]  # fmt: skip


class Digits:
    """Accuracy in percent; higher is better."""

    unit, better, lr, momentum = "%", 1, 0.05, 0.9

    def __init__(self, steps):
        self.steps = steps or 400
        digits = load_digits()
        images = (digits.images[:, None] / 16).astype(np.float32)
        split = train_test_split(
            images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
        )
        self.train_x, self.test_x, self.train_y, self.test_y = map(torch.from_numpy, split)

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model, rng):
        batch = torch.from_numpy(rng.integers(0, len(self.train_x), 16))
        return nn.functional.cross_entropy(model(self.train_x[batch]), self.train_y[batch])

    def quality(self, model):
        return 100 * (model(self.test_x).argmax(1) == self.test_y).double().mean().item()


class Bytes:
    """Nats per byte; lower is better."""

    unit, better, context = "nats", -1, 64

    def __init__(self, steps):
        self.steps = steps or 200
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
        cut = len(data) * 9 // 10
        self.train, self.test = data[:cut], data[cut:]

    def model(self):
        return ByteTransformer(self.context)

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=2e-3)

    def batch(self, data, rng, count):
        starts = rng.integers(0, len(data) - self.context - 1, count)
        rows = np.stack([data[s : s + self.context + 1] for s in starts]).astype(np.int64)
        return torch.from_numpy(rows)

    def nats(self, model, rows):
        logits = model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def loss(self, model, rng):
        return self.nats(model, self.batch(self.train, rng, 8))

    def quality(self, model):
        return self.nats(model, self.batch(self.test, np.random.default_rng(0), 256)).item()


class ByteTransformer(nn.Module):
    def __init__(self, context, width=128):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        n = x.shape[1]
        hidden = self.embed(x) + self.place[:n]
        return self.head(self.layers(hidden, mask=self.mask[:n, :n], is_causal=True))


TASKS = {"digits": Digits, "bytes": Bytes}


def train(task, weights, spec):
    """One rank's training; returns (quality, bytes ratio, replicas equal)."""
    hvd.init()
    model = task.model()
    model.load_state_dict(weights)
    optimizer = hvd.DistributedOptimizer(
        task.optimizer(model), named_parameters=model.named_parameters(), compression=spec
    )
    rng = np.random.default_rng([1, hvd.rank()])
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * schedule(step / task.steps)
        optimizer.zero_grad()
        task.loss(model, rng).backward()
        optimizer.step()
    equal = hvd.replicas_equal(model.state_dict())
    model.eval()
    with torch.no_grad():
        quality = task.quality(model) if hvd.rank() == 0 else 0.0
    return quality, hvd.stats().ratio, equal


def schedule(done):
    """Warm up over a tenth of the steps, then follow a cosine down to nothing."""
    return min(1.0, 10 * done) * (1 + math.cos(math.pi * done)) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", default=DEFAULT, metavar="SPEC")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="of each task; default 400 and 200")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in args.tasks:
        task = TASKS[name](args.steps)
        torch.manual_seed(0)
        weights = task.model().state_dict()
        print(f"\n{name}: {TASKS[name].__doc__.lower()} {task.steps} steps, {WORKERS} workers\n")
        base = None
        for spec in args.specs:
            start = time.perf_counter()
            ranks = ringlet.run(train, (task, weights, spec), np=WORKERS, transport="local")
            quality, ratio, _ = ranks[0]
            base = quality if base is None else base
            same = "bit-equal" if all(equal for _, _, equal in ranks) else "DIFFER"
            change, seconds = quality - base, time.perf_counter() - start
            print(
                f"  {spec:<44} {quality:8.3f} {task.unit:<5} {change:+8.3f}  "
                f"{ratio:7.1f}x fewer bytes  {same}  {seconds:5.1f} s",
                flush=True,
            )
            row = {"task": name, "spec": spec, "quality": quality, "ratio": ratio}
            results.append({**row, "change": change, "replicas": same})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
