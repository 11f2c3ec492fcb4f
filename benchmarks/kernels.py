"""Codec speed on this machine, beside memcpy and beside torch composed of plain operators.

    python benchmarks/kernels.py [--mib 64] [--threads 2] [--save] [SPEC ...]
    python benchmarks/kernels.py --device cuda [--mib 256] [--save] [SPEC ...]

Rates are GB/s of float32 input (for decoding: of output), medians over interleaved rounds; the
column behind each is the share of memcpy's rate in the same run. ``--save`` keeps them, with the
processor and the date, in benchmarks/results/ as JSON and as a table. On a GPU rates count the
bytes that must move; see kernels_cuda.py.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from progress import each

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.core.threads import limited, run_ranges, threads

DEFAULT = [
    "fp16", "bf16", "fp8", "int8", "int8(stochastic=True)", "int4", "int4(stochastic=True)",
    "mxfp8", "mxfp6", "mxfp4", "mxfp4(stochastic=True)", "nvfp4",
    "minmax", "qsgd", "natural", "terngrad", "onebit", "topk", "block_topk",
    "block_topk(ratio=0.25, block=64)", "block_topk(ratio=0.25, block=64, dct=True)",
]  # fmt: skip
SHARDS = 4
RESULTS = Path(__file__).parent / "results"
HEADS = ["encode", "with ef", "decode", f"sum {SHARDS} + encode", "torch encode"]


class Codec:
    """One compressor with its buffers, as the engine would hold them."""

    def __init__(self, spec, x):
        self.compressor, self.x = parse(spec), x
        self.residual, self.out = np.zeros_like(x), np.empty_like(x)
        self.context = Context(numel=x.size, shape=x.shape, workspace=Workspace())
        self.payload = empty_payload(self.compressor, x.size, self.context)
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


def composed(spec, t):
    """Return the same encoding of the tensor ``t`` out of torch operators, or None."""
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
        k = parse(spec).count(t.numel())

        def select():
            _, indices = torch.topk(t.abs(), k)
            return t[indices], indices.int()

        return select
    return None


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def machine():
    """Return the processor and what it runs, and nothing that tells whose it is."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def save(args, rows):
    """Write ``rows`` as JSON and as a table."""
    RESULTS.mkdir(exist_ok=True)
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "mib": args.mib,
        "threads": args.threads,
        "rounds": args.rounds,
    }
    data = json.dumps(about | {"unit": "GB/s of float32", "rows": rows}, indent=1)
    (RESULTS / "kernels.json").write_text(data + "\n")
    said = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    lines = [
        "# Codec speed",
        "",
        f"`python benchmarks/kernels.py --save`, {about['date']}: {said}.",
        f"{args.mib} MiB of float32, {args.threads} threads, medians of {args.rounds} interleaved",
        "rounds, GB/s; in brackets the share of memcpy's rate in the same rounds.",
        "",
        "| spec | " + " | ".join(HEADS) + " | memcpy |",
        "|---" * (len(HEADS) + 2) + "|",
    ]
    for row in rows:
        cells = [shown(row, head) for head in HEADS]
        lines.append(f"| `{row['spec']}` | " + " | ".join(cells) + f" | {row['memcpy']:.1f} |")
    (RESULTS / "kernels.md").write_text("\n".join(lines) + "\n")


def shown(row, head):
    return f"{row[head]:.1f} ({row[head] / row['memcpy']:.2f}x)" if head in row else "-"


def measured(spec, x, memcpy, rounds):
    """Return the rates of one compressor, and of ``memcpy`` in the same rounds."""
    codec, peer = Codec(spec, x), composed(spec, torch.from_numpy(x))
    jobs = [memcpy, codec.encode, codec.encode_feedback, codec.decode]
    jobs += [codec.decode_sum_encode, *([peer] if peer else [])]
    for job in jobs:
        job()  # compile, and touch the memory
    times = [[seconds(job) for job in jobs] for _ in range(rounds)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    rates = [round(x.nbytes / t / 1e9, 2) for t in medians]
    return {"spec": spec} | dict(zip(["memcpy", *HEADS], rates, strict=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mib", type=int, help="size of the float32 input (64; on a GPU 256)")
    parser.add_argument("--threads", type=int, default=threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/")
    args = parser.parse_args()
    args.mib = args.mib or (256 if args.device == "cuda" else 64)
    if args.device == "cuda":
        import kernels_cuda

        args.specs = args.specs or kernels_cuda.DEFAULT
        kernels_cuda.run(args, composed)
        return
    args.specs = args.specs or DEFAULT
    torch.set_num_threads(args.threads)
    x = np.random.default_rng(0).standard_normal(args.mib << 18, dtype=np.float32)
    target = np.empty_like(x)

    def memcpy():
        run_ranges(x.size, 1, lambda a, b: np.copyto(target[a:b], x[a:b]))

    print(f"{args.mib} MiB of float32, {args.threads} threads, medians of {args.rounds} rounds\n")
    print("spec".ljust(44) + "".join(h.rjust(18) for h in HEADS))
    rows = []
    with limited(args.threads):
        for row in each(lambda spec: measured(spec, x, memcpy, args.rounds), args.specs):
            rows.append(row)
            cells = "".join(shown(row, head).rjust(18) for head in HEADS)
            print(row["spec"].ljust(44) + cells + f"   memcpy {row['memcpy']:.1f}", flush=True)
    if args.save:
        save(args, rows)


if __name__ == "__main__":
    main()
