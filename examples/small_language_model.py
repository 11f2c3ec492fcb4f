"""A small language model on real text: bytes of the standard library's sources, two layers.

ringlet run -np 2 python examples/small_language_model.py --compression "powersgd(rank=4) | ef"
"""

import argparse
import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ringlet.torch as hvd

CONTEXT, WIDTH = 64, 96


class ByteModel(nn.Module):
    """Predicts the next byte from up to CONTEXT bytes before it."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def loss_of(model, text, size, rng):
    starts = rng.integers(0, len(text) - CONTEXT - 1, size)
    rows = np.stack([text[s : s + CONTEXT + 1] for s in starts]).astype(np.int64)
    rows = torch.from_numpy(rows)
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="powersgd(rank=4) | ef", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    train, held_out = np.split(text, [len(text) * 9 // 10])
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), args.compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rng = np.random.default_rng(hvd.rank())
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = loss_of(model, train, 16, rng)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        nats = loss_of(model, held_out, 64, np.random.default_rng(0)).item()
    equal, stats = hvd.replicas_equal(model.state_dict()), hvd.stats()
    if hvd.rank() == 0:
        print(f"held out {nats:.3f} nats a byte (guessing: {math.log(256):.3f})")
        print(f"{stats.ratio:.1f} times fewer bytes sent")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
