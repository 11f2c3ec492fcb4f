"""Codec speed on a GPU: what ``kernels.py --device cuda`` does.

Rates are GB/s of the bytes that must move: what is read once and written once, residuals too. The
percentage is the share of what a device-to-device copy moves in the same run (reads plus writes).
Times are medians of CUDA events around replays of a captured graph, so that a codec that waits for
the host fails instead of looking slow; but payloads of variable size make it wait, and exchanges of
several rounds call cuBLAS: those are timed call by call, host included. Then the tensors of a
ResNet-50 are encoded and decoded in common launches and one by one. A spec that fails is told, and
the others are measured, unless the GPU answers no more. ``--save`` keeps everything, with the GPU
and the date.
"""

import datetime
import json
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from cuda_codes import CAPTURED, HEADS, Bucket, Codes
from engine import resnet_sizes
from progress import each

DEFAULT = [
    "fp16", "bf16", "fp8", "int8", "int8(stochastic=True)", "int4", "int4(stochastic=True)",
    "mxfp8", "mxfp6", "mxfp4", "mxfp4(stochastic=True)", "nvfp4",
    "maxnorm", "minmax", "qsgd", "natural", "terngrad", "onebit", "signsgd", "topk", "block_topk",
    "block_topk(ratio=0.25, block=64)", "block_topk(ratio=0.25, block=64, dct=True)",
    "threshold(value=2.5)", "topk_sampled", "sidco", "lossless", "randomk", "shared_int",
    "terngrad_shared", "powersgd", "acpsgd", "int8 | hadamard", "qsgd | scaled", "int8 | ef21",
    "topk | ef21", "int8 | momentum_correction", "topk | momentum_correction(clip=1.0)",
]  # fmt: skip
BUCKETS = ["fp16", "int8", "int8 | ef", "int4(stochastic=True)", "onebit | ef", "block_topk | ef",
           "topk | ef"]  # fmt: skip
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
    cupy.cuda.Device().synchronize()  # arrays were made on another stream
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


def eager_seconds(cupy, function, rounds):
    """Return the median time of calls of ``function``, what the host does included."""
    cupy.cuda.Device().synchronize()
    stream, times = cupy.cuda.Stream(non_blocking=True), []
    with stream:
        for _ in range(rounds + 2):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            function()
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(times[2:])


def host_seconds(cupy, function, rounds):
    """Return the median time that the host takes to launch ``function``'s kernels."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
        cupy.cuda.get_current_stream().synchronize()
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

    def peer(spec, x):
        return composed(spec, torch.from_dlpack(x))

    def row(spec):
        return measured(cupy, spec, x, rounds, copy, peer)

    def bucket(spec):
        return of_bucket(cupy, spec, resnet_sizes(), rounds)

    rows, failed = all_of(cupy, row, args.specs, line)
    buckets, more = all_of(cupy, bucket, BUCKETS, bucket_line)
    if args.save and (rows or buckets):
        save(about | {"failed": failed | more}, rows, buckets)
    if failed or more:
        sys.exit(f"failed: {', '.join(failed | more)}")


def all_of(cupy, measure, specs, shown):
    """Measure every spec; return what was measured, and the errors of others by spec."""
    rows, failed = [], {}

    def tried(spec):
        try:
            return measure(spec)
        except Exception as error:  # a kernel's, a compiler's, memory that lacks: others may do
            failed[spec] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            return None

    for row in each(tried, specs):
        if row is not None:
            rows.append(row)
            print(shown(row), flush=True)
            continue
        try:
            cupy.cuda.Device().synchronize()
        except Exception as error:  # such as an illegal address, which stays
            print(f"the GPU answers no more: {error}", flush=True)
            break
    return rows, failed


def measured(cupy, spec, x, rounds, copy, composed):
    """Return rates, launches and times of one compressor; ``copy`` is a copy's rate in GB/s."""
    codec, row = Codes(cupy, spec, x), {"spec": spec}
    row["captured"] = CAPTURED[codec.kind]
    for head, function, moved in codec.jobs():
        taken = (seconds if row["captured"] else eager_seconds)(cupy, function, rounds)
        rate = moved / taken / 1e9
        row[head] = {
            "GB/s": round(rate), "% of copy": round(100 * rate / copy),
            "launches": launches(codec.device, function), "us": round(taken * 1e6, 1),
        }  # fmt: skip
    peer = composed(spec, x)
    if peer:
        taken = torch_seconds(peer, rounds)
        row["torch"] = {"us": round(taken * 1e6, 1)}
        row["times torch"] = round(taken * 1e6 / row["encode"]["us"], 1)
    return row


def of_bucket(cupy, spec, sizes, rounds):
    """Return launches and times of tensors of these sizes, together and one by one."""
    bucket = Bucket(cupy, spec, sizes)
    row = {"spec": spec}
    for what, together, singly in bucket.jobs():
        for way, function in ("many", together), ("one by one", singly):
            row[f"{what}, {way}"] = {
                "launches": launches(bucket.device, function),
                "us": round(seconds(cupy, function, rounds) * 1e6, 1),
                "host us": round(host_seconds(cupy, function, rounds) * 1e6, 1),
            }
    return row


def bucket_cell(row, name):
    found = row[name]
    return f"{found['launches']}: {found['us']} us (host {found['host us']} us)"


def cell(row, head):
    found = row.get(head)
    if found is None:
        return "-"
    return f"{found['GB/s']} ({found['% of copy']}%, {found['launches']})"


def line(row):
    cells = [f"{head} {cell(row, head)}" for head in HEADS]
    beside = f"  {row['times torch']}x torch" if "torch" in row else ""
    return f"{row['spec']:<44}" + "  ".join(cells) + beside


def bucket_line(row):
    cells = "  ".join(f"{name} {bucket_cell(row, name)}" for name in list(row)[1:])
    return f"{row['spec']:<44}{cells}"


def save(about, rows, buckets):
    RESULTS.mkdir(exist_ok=True)
    kept = about | {"rows": rows, "buckets": buckets}
    (RESULTS / "kernels_cuda.json").write_text(json.dumps(kept, indent=1) + "\n")
    said = ", ".join(f"{name} {value}" for name, value in about.items() if name != "failed")
    lines = [
        "# Codec speed on a GPU",
        "",
        f"`python benchmarks/kernels.py --device cuda --save`: {said}.",
        "GB/s of the bytes that must move; in brackets the share of a copy's rate, and launches.",
        "With a star: timed call by call, host included; others as replays of a captured graph.",
        "",
        "| spec | " + " | ".join(HEADS) + " | encode, times as fast as torch operators |",
        "|---" * (len(HEADS) + 2) + "|",
    ]
    for row in rows:
        cells = [cell(row, head) for head in HEADS]
        name = f"`{row['spec']}`" + ("" if row["captured"] else " *")
        lines.append(f"| {name} | " + " | ".join([*cells, str(row.get("times torch", "-"))]) + " |")
    if about.get("failed"):
        lines += ["", f"Failed: {', '.join(f'`{spec}`' for spec in about['failed'])}."]
    names = list(buckets[0])[1:] if buckets else []
    lines += [
        "",
        "The 161 tensors of a ResNet-50: launches, time of a captured graph, time of the host.",
        "",
        "| spec | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for row in buckets:
        cells = [bucket_cell(row, name) for name in names]
        lines.append(f"| `{row['spec']}` | " + " | ".join(cells) + " |")
    (RESULTS / "kernels_cuda.md").write_text("\n".join(lines) + "\n")
