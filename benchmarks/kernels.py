"""Codec speed on this machine, beside memcpy and beside torch composed of plain operators.

    python benchmarks/kernels.py [--mib 64] [--threads 2] [SPEC ...]

Rates are GB/s of float32 input (for decoding: of output), medians over interleaved rounds; the
column behind each is the share of memcpy's rate in the same run.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from ringlet.compressors import Context, Workspace, parse, pool
from ringlet.compressors.contract import storage

DEFAULT = [
    "fp16", "bf16", "int8", "int8(stochastic=True)", "int4", "int4(stochastic=True)", "minmax",
    "qsgd", "topk",
]  # fmt: skip
SHARDS = 4


class Codec:
    """One compressor with its buffers, as the engine would hold them."""

    def __init__(self, spec, x):
        self.compressor, self.x = parse(spec), x
        self.residual, self.out = np.zeros_like(x), np.empty_like(x)
        self.context = Context(numel=x.size, shape=x.shape, workspace=Workspace())
        layout = self.compressor.layout(x.size)
        self.payload = {p.name: np.zeros(p.elements, storage(p.dtype)) for p in layout}
        self.sum = {name: array.copy() for name, array in self.payload.items()}

    def encode(self):
        self.compressor.encode_into(self.x, self.payload, self.context)

    def encode_feedback(self):
        self.compressor.feedback_into(self.x, self.residual, 1.0, self.payload, self.context)

    def decode(self):
        self.compressor.decompress(self.payload, self.out, self.context)

    def decode_sum_encode(self):
        self.compressor.sum_into([self.payload] * SHARDS, self.out, self.context)
        self.compressor.encode_into(self.out, self.sum, self.context)


def composed(spec, x):
    """Return the same encoding out of torch operators, or None."""
    t = torch.from_numpy(x)
    name = spec.split("(")[0]
    if name in ("fp16", "bf16"):
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        return lambda: t.to(dtype)
    if name in ("int8", "int4"):
        levels = 127 if name == "int8" else 7

        def quantise():
            rows = t.view(-1, 512)
            scale = rows.abs().amax(1, keepdim=True) / levels
            place = rows / scale
            if "stochastic" in spec:
                codes = torch.floor(place + torch.rand_like(rows))
            else:
                codes = torch.round(place)
            codes = codes.to(torch.int8).view(-1)
            return codes if name == "int8" else (codes[::2] & 15) | (codes[1::2] << 4)

        return quantise
    if name == "topk":
        k = parse(spec).count(x.size)

        def select():
            _, indices = torch.topk(t.abs(), k)
            return t[indices], indices.int()

        return select
    return None


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", default=DEFAULT, metavar="SPEC")
    parser.add_argument("--mib", type=int, default=64, help="size of the float32 input")
    parser.add_argument("--threads", type=int, default=pool.threads())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = np.random.default_rng(0).standard_normal(args.mib << 18, dtype=np.float32)
    target = np.empty_like(x)

    def memcpy():
        pool.run_ranges(x.size, 1, lambda a, b: np.copyto(target[a:b], x[a:b]))

    print(f"{args.mib} MiB of float32, {args.threads} threads, medians of {args.rounds} rounds\n")
    heads = ["encode", "with ef", "decode", f"sum {SHARDS} + encode", "torch encode"]
    print("spec".ljust(24) + "".join(h.rjust(18) for h in heads))
    with pool.limited(args.threads):
        for spec in args.specs:
            codec, peer = Codec(spec, x), composed(spec, x)
            jobs = [memcpy, codec.encode, codec.encode_feedback, codec.decode]
            jobs += [codec.decode_sum_encode, *([peer] if peer else [])]
            for job in jobs:
                job()  # compile, and touch the memory
            times = [[seconds(job) for job in jobs] for _ in range(args.rounds)]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            rates = [x.nbytes / t / 1e9 for t in medians]
            cells = [f"{rate:.1f} ({rate / rates[0]:.2f}x)" for rate in rates[1:]]
            print(
                spec.ljust(24) + "".join(c.rjust(18) for c in cells) + f"   memcpy {rates[0]:.1f}"
            )


if __name__ == "__main__":
    main()
