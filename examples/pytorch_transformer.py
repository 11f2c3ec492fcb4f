"""Train a byte-level transformer on Python's own sources, data-parallel, and resume it.

    ringlet run -np 2 python examples/pytorch_transformer.py --compression "int4 | ef"
    ringlet run -np 2 python examples/pytorch_transformer.py --resume checkpoints --steps 200

Shows what a Horovod script does: the learning rate grows with the number of workers, rank 0 alone
writes the model, and every rank its own residuals beside it, so that a resumed run goes on bit for
bit.
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ringlet.torch as hvd

CONTEXT = 64


class ByteTransformer(nn.Module):
    """Two layers that predict the next of 64 bytes."""

    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def load_text():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batch(data, size, rng):
    starts = rng.integers(0, len(data) - CONTEXT - 1, size)
    rows = torch.from_numpy(np.stack([data[s : s + CONTEXT + 1] for s in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, tokens, targets):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def save(folder, model, optimizer, step):
    """Write the model once, and what this rank's compressors hold back."""
    state = optimizer.state_dict()
    torch.save(state, folder / f"optimizer.{hvd.rank()}.pt")
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, folder / "model.pt")


def resume(folder, model, optimizer):
    """Return the step to go on at."""
    saved = torch.load(folder / "model.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    shards = sorted(folder.glob("optimizer.*.pt"))
    states = [torch.load(shard, weights_only=True) for shard in shards]
    if "ringlet" in states[0]:
        optimizer.load_sharded(states)
    else:
        optimizer.load_state_dict(states[0])
    return saved["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="int4 | ef", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--lr", type=float, default=5e-4, help="per rank; scaled by their number")
    parser.add_argument("--save", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression={"embed.*": "fp16", "*": args.compression},
    )
    first = resume(args.resume, model, optimizer) if args.resume else 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train, test = load_text()
    for step in range(first, args.steps):
        rng = np.random.default_rng([step, hvd.rank()])  # a resumed run sees the same batches
        optimizer.zero_grad()
        loss = loss_of(model, *batch(train, args.batch_size, rng))
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        if step % 20 == 0:
            average = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step:4d}  loss {average:.3f}")
    model.eval()
    with torch.no_grad():
        rng = np.random.default_rng(hvd.rank())
        held_out = hvd.allreduce(loss_of(model, *batch(test, 32, rng)), name="held out").item()
    args.save.mkdir(parents=True, exist_ok=True)
    save(args.save, model, optimizer, args.steps)
    equal = hvd.replicas_equal(model.state_dict())
    if hvd.rank() == 0:
        ratio = hvd.stats().ratio
        print(f"held out {held_out:.3f} nats a byte; {ratio:.1f} times fewer bytes sent")
        print(f"replicas bit-equal: {'yes' if equal else 'NO'}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
