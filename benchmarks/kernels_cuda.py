"""Codec speed on a GPU: what ``kernels.py --device cuda`` does.

Rates are GB/s of the bytes that must move: what is read once and written once, residuals too. The
percentage is the share of what a device-to-device copy moves in the same run (reads plus writes).
Times are medians of CUDA events around replays of a captured graph, so that a codec that waits for
the host fails instead of looking slow. ``--save`` keeps them with the GPU and the date.
"""

import datetime
import json
import platform
import statistics
import sys
from pathlib import Path

import numpy as np

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.contract import empty_payload
from ringlet.compressors.kernels.cuda.bucketed import Codec, Target
from ringlet.compressors.kernels.cuda.device import device_of

SHARDS = 4
HEADS = ["encode", "with ef", "decode", f"sum {SHARDS} + encode"]
RESULTS = Path(__file__).parent / "results"


def find_gpu():
    """Return CuPy, or end with what is missing."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            return cupy
        why = "there is no NVIDIA GPU here"
    except Exception as error:  # not installed, no driver, no runtime: whatever it is, say so
        why = f"{type(error).__name__}: {error}"
    sys.exit(f"--device cuda needs an NVIDIA GPU and CuPy (pip install 'ringlet[cuda12]'): {why}")


class Codes:
    """One compressor with its buffers on the GPU."""

    def __init__(self, cupy, spec, x):
        self.cupy, self.c, self.x, n = cupy, parse(spec), x, x.size
        self.device = device_of(cupy)
        self.residual, self.out = cupy.zeros_like(x), cupy.empty_like(x)
        self.context = Context(numel=n, shape=(n,), xp=cupy, workspace=Workspace(cupy))
        self.payload = empty_payload(self.c, n, self.context)
        self.sum = {name: array.copy() for name, array in self.payload.items()}
        self.encode()
        # What other ranks would have sent: buffers of their own, or the cache would serve them.
        self.received = [
            {name: array.copy() for name, array in self.payload.items()} for _ in range(SHARDS)
        ]
        self.wire = sum(array.nbytes for array in self.payload.values())

    def encode(self):
        self.c.encode_into(self.x, self.payload, self.context)

    def encode_feedback(self):
        self.c.feedback_into(self.x, self.residual, 1.0, self.payload, self.context)

    def decode(self):
        self.c.decompress(self.payload, self.out, self.context)

    def decode_sum_encode(self):
        codec = self.c.cuda() if hasattr(self.c, "cuda") else None
        if type(codec) is not Codec:
            self.c.sum_into(self.received, self.out, self.context)
            self.c.encode_into(self.out, self.sum, self.context)
            return
        sources = [[p[name] for name in self.c.strides()] for p in self.received]
        arrays = [self.sum[name] for name in self.c.strides()]
        target = Target(None, self.x.size, arrays, None, self.context.key(), 0, sources)
        codec.encode(self.device, [target])

    def jobs(self):
        """Return (head, function, bytes that must move)."""
        x, wire = self.x.nbytes, self.wire
        functions = self.encode, self.encode_feedback, self.decode, self.decode_sum_encode
        moved = x + wire, 3 * x + wire, x + wire, (SHARDS + 1) * wire
        return list(zip(HEADS, functions, moved, strict=True))


def launches(device, function):
    """Return how many kernels of ours ``function`` launches."""
    launch, seen = type(device).launch, []

    def counting(self, program, kernel, blocks, table):
        seen.append(kernel)
        launch(self, program, kernel, blocks, table)

    type(device).launch = counting
    try:
        function()
    finally:
        type(device).launch = launch
    return len(seen)


def seconds(cupy, function, rounds):
    """Return the median time of ``function``, captured as a graph after two warm-up calls."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        function(), function()
        stream.synchronize()
        stream.begin_capture()
        function()
        graph = stream.end_capture()
        times = []
        for _ in range(rounds):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(times[2:])


def torch_seconds(function, rounds):
    """Return the median time of torch operators on torch's stream."""
    import torch

    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def run(args, composed):
    cupy = find_gpu()
    import torch

    rounds = max(args.rounds, 20)
    x = cupy.asarray(np.random.default_rng(0).standard_normal(args.mib << 18, dtype=np.float32))
    target = cupy.empty_like(x)
    copy = 2 * x.nbytes / seconds(cupy, lambda: cupy.copyto(target, x), rounds) / 1e9
    about = {
        "date": datetime.date.today().isoformat(),
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "copy GB/s": round(copy),
        "mib": args.mib,
        "rounds": rounds,
        "python": platform.python_version(),
        "cupy": cupy.__version__,
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows = []
    for spec in args.specs:
        codec, row = Codes(cupy, spec, x), {"spec": spec}
        for head, function, moved in codec.jobs():
            taken = seconds(cupy, function, rounds)
            rate = moved / taken / 1e9
            row[head] = {
                "GB/s": round(rate), "% of copy": round(100 * rate / copy),
                "launches": launches(codec.device, function), "us": round(taken * 1e6, 1),
            }  # fmt: skip
        peer = composed(spec, torch.from_dlpack(x))
        if peer:
            taken = torch_seconds(peer, rounds)
            row["torch"] = {"us": round(taken * 1e6, 1)}
            row["times torch"] = round(taken * 1e6 / row["encode"]["us"], 1)
        rows.append(row)
        print(line(row), flush=True)
    if args.save:
        save(about, rows)


def cell(row, head):
    found = row[head]
    return f"{found['GB/s']} ({found['% of copy']}%, {found['launches']})"


def line(row):
    cells = [f"{head} {cell(row, head)}" for head in HEADS]
    beside = f"  {row['times torch']}x torch" if "torch" in row else ""
    return f"{row['spec']:<44}" + "  ".join(cells) + beside


def save(about, rows):
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kernels_cuda.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    said = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [
        "# Codec speed on a GPU",
        "",
        f"`python benchmarks/kernels.py --device cuda --save`: {said}.",
        "GB/s of the bytes that must move; in brackets the share of a copy's rate, and launches.",
        "",
        "| spec | " + " | ".join(HEADS) + " | encode, times as fast as torch operators |",
        "|---" * (len(HEADS) + 2) + "|",
    ]
    for row in rows:
        cells = [cell(row, head) for head in HEADS]
        lines.append(
            f"| `{row['spec']}` | " + " | ".join([*cells, str(row.get("times torch", "-"))]) + " |"
        )
    (RESULTS / "kernels_cuda.md").write_text("\n".join(lines) + "\n")
