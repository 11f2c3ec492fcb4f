"""Allreduce of float32 by size: our transports beside raw mpi4py and torch.distributed's gloo.

    python benchmarks/allreduce.py [--max 64] [--ranks 2 4] [--rounds 15] [--save]

All contenders run in the same processes, by turns in every round; a time is the slowest rank's,
and what is shown is the median over rounds. algbw is bytes over time, busbw that times 2(P-1)/P,
which is what the slowest link carries. "of raw" is the other library's time over ours, the median
over rounds: above 1 we are faster. Ranks that are threads (local) run afterwards. ``--save``
writes benchmarks/results/allreduce.json and .md.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from progress import announce, follow

from ringlet.cli.progress import Progress
from ringlet.ring import ReduceOp
from ringlet.ring.transports.local import run_local

RESULTS = Path(__file__).parent / "results"
KIB, MIB = 1 << 10, 1 << 20
RAW = {"mpi": "mpi4py", "gloo": "torch"}


def sizes(most):
    """1 KiB, 4 KiB, ... up to ``most`` bytes."""
    size = KIB
    while size <= most:
        yield size
        size *= 4


def shown(nbytes):
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def repeats(nbytes):
    """Calls in a row, so that short ones last longer than the clock's grain."""
    return max(1, min(50, (2 * MIB) // nbytes))


def clock(function, nbytes, meet):
    """Return the seconds of one call, after all ranks have met."""
    n = repeats(nbytes)
    meet()
    start = time.perf_counter()
    for _ in range(n):
        function()
    return (time.perf_counter() - start) / n


def worker(out, store, most, rounds):
    """One MPI process: every contender, every size; rank 0 writes the times to ``out``."""
    import torch
    import torch.distributed as dist

    from ringlet.ring.transports.gloo import GlooCommunicator
    from ringlet.ring.transports.mpi import MpiCommunicator

    mpi = MpiCommunicator()
    from mpi4py import MPI

    raw = MPI.COMM_WORLD.Dup()
    rank, size = raw.Get_rank(), raw.Get_size()
    gloo = GlooCommunicator(dist.FileStore(f"{store}-own", size), rank, size, host="127.0.0.1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    times = {}
    for nbytes in sizes(most):
        if rank == 0:
            announce(shown(nbytes))
        x = np.full(nbytes // 4, 0.0, np.float32)
        tensor = torch.from_numpy(x)
        contenders = {
            "mpi4py": lambda x=x: raw.Allreduce(MPI.IN_PLACE, [x, x.size, MPI.FLOAT]),
            "mpi": lambda x=x: mpi.allreduce(x),
            "torch": lambda tensor=tensor: dist.all_reduce(tensor),
            "gloo": lambda x=x: gloo.allreduce(x),
        }
        found = times[nbytes] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            order = sorted(contenders, reverse=bool(turn % 2))
            for name in order:
                seconds = clock(contenders[name], nbytes, raw.Barrier)
                slowest = raw.allreduce(seconds, MPI.MAX)
                if turn:  # the first one warms up
                    found[name].append(slowest)
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    dist.destroy_process_group()
    gloo.close()
    mpi.close()


def threads(size, most, rounds):
    """Return the times of ranks that are threads."""

    def run(comm):
        times = {}
        for nbytes in sizes(most):
            x = np.full(nbytes // 4, 0.0, np.float32)
            times[nbytes] = []
            for turn in range(rounds + 1):
                slowest = np.array([clock(lambda: comm.allreduce(x), nbytes, comm.barrier)])  # noqa: B023
                comm.allreduce(slowest, ReduceOp.MAX)
                if turn:
                    times[nbytes].append(float(slowest[0]))
        return times

    return run_local(run, size)[0]


def measure(size, options, progress):
    """Return the seconds of every round, by bytes and contender."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "times.json"
        mpiexec = Path(sys.executable).with_name("mpiexec")
        arguments = [out, f"{directory}/store", options.max * MIB, options.rounds]
        command = [mpiexec, "-n", size, sys.executable, __file__, "--worker", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        follow(progress, f"{size} ranks", [str(part) for part in command], env=environment)
        times = {int(nbytes): found for nbytes, found in json.loads(out.read_text()).items()}
    progress.begin(f"{size} ranks that are threads")
    for nbytes, found in threads(size, options.max * MIB, options.rounds).items():
        times[nbytes]["local"] = found
    progress.end()
    return times


def summarise(size, times):
    """Return one row a size and transport of ours."""
    rows = []
    for nbytes, found in times.items():
        for name in ("mpi", "gloo", "local"):
            seconds = statistics.median(found[name])
            row = {"ranks": size, "bytes": nbytes, "transport": name, "us": seconds * 1e6}
            row["algbw"] = nbytes / seconds / 1e9
            row["busbw"] = row["algbw"] * 2 * (size - 1) / size
            if name in RAW:
                theirs = found[RAW[name]]
                row["raw_us"] = statistics.median(theirs) * 1e6
                pairs = zip(theirs, found[name], strict=True)
                row["of_raw"] = statistics.median(a / b for a, b in pairs)
            rows.append(row)
    return rows


def show(rows):
    """Return the rows as a Markdown table."""
    lines = [
        "| ranks | size | transport | us | algbw GB/s | busbw GB/s | raw library us | of raw |",
        "|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        raw = f"{row['raw_us']:.1f} | {row['of_raw']:.2f}" if "of_raw" in row else "|"
        lines.append(
            f"| {row['ranks']} | {shown(row['bytes'])} | {row['transport']} | {row['us']:.1f}"
            f" | {row['algbw']:.2f} | {row['busbw']:.2f} | {raw} |"
        )
    return "\n".join(lines)


def machine(options):
    """Return what a reader needs to know of the machine, and nothing that names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rounds": options.rounds,
    }


def main():
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--max", type=int, default=64, help="largest size in MiB (default 64)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/")
    options = parser.parse_args()
    pieces = len(options.ranks) * (len(list(sizes(options.max * MIB))) + 1)
    with Progress(pieces) as progress:
        rows = [row for n in options.ranks for row in summarise(n, measure(n, options, progress))]
    table = show(rows)
    print(table)
    if options.save:
        about = machine(options)
        kept = {"machine": about, "rows": rows}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "allreduce.json").write_text(json.dumps(kept, indent=1) + "\n")
        said = f"{about['cpu']}, {about['cores']} cores, Python {about['python']}"
        lines = [
            "# Uncompressed allreduce",
            "",
            f"`python benchmarks/allreduce.py --save`, {about['date']}: {said}.",
            f"Medians of {options.rounds} rounds; last comes the other library's time over ours.",
            "",
            table,
        ]
        (RESULTS / "allreduce.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
