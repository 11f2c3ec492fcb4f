"""How well the cost model predicts: fitted to a few measurements on shaped links, tried on others.

    python benchmarks/costmodel.py [--mbit 1000] [--rounds 7] [--save]

Hosts are network namespaces (root and iproute2; says so and ends where there are none), with one
rank each over gloo. Fitted are 2 and 4 ranks with 4 KiB, 4 and 16 MiB of float32; predicted are 3
ranks, and sizes in between and beyond. What is as short as the shaper's burst of 256 kB is left
out, because it travels faster than the link. The codec is float16, so that half of the bytes
travel. Times are medians over rounds of the slowest rank. ``--save`` writes
benchmarks/results/costmodel.json.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from progress import each

from ringlet.ring import ReduceOp
from ringlet.ring.collectives.compressed import allgather_reduce, encode, scatter_reduce
from ringlet.ring.cost.cost_model import Measurement, Workload, fit, project
from ringlet.ring.float16 import kernels
from ringlet.ring.rank_order import even_counts

MIB = 1 << 20
FITTED = {2: (1 / 256, 4, 16), 4: (1 / 256, 4, 16)}  # MiB by ranks
HELD_OUT = {2: (8, 24), 3: (4, 8, 16), 4: (8, 24)}
RESULTS = Path(__file__).parent / "results"


class Float16:
    """float32 values in ``parts`` parts that travel as float16."""

    def __init__(self, values, parts):
        ends = np.cumsum(even_counts(values.size, parts))[:-1]
        self.parts = parts
        self.values = np.split(values, ends)
        self.outputs = np.split(np.empty_like(values), ends)
        self.sum = np.empty_like(self.values[0])
        self.kernels = kernels("float16")

    def prepare(self):
        pass

    def capacity(self, part):
        return 2 * self.values[part].size

    def encode_into(self, part, out):
        self.kernels.narrow(self.values[part], out[: self.capacity(part)].view(np.uint16))
        return self.capacity(part)

    def decode_sum_into(self, part, payloads):
        self.add_up(payloads, self.outputs[part])

    def decode_sum_encode(self, part, payloads, out):
        total = self.sum[: self.values[part].size]
        self.add_up(payloads, total)
        self.kernels.narrow(total, out.view(np.uint16))
        return self.capacity(part)

    def decode_into(self, part, payload):
        self.kernels.widen(payload.view(np.uint16), self.outputs[part])

    def add_up(self, payloads, total):
        self.kernels.widen(payloads[0].view(np.uint16), total)
        for payload in payloads[1:]:
            self.kernels.add(payload.view(np.uint16), total)


def reuse():
    """Return an allocator that hands out the same buffers in every round."""
    buffers = {}

    def begin():
        place = iter(range(9))
        return lambda nbytes: buffers.setdefault((next(place), nbytes), np.empty(nbytes, np.uint8))

    return begin


def worker(rank, size, store, rounds, wanted):
    """One rank: print the median times as JSON on rank 0."""
    from torch.distributed import FileStore

    from ringlet.ring.transports.gloo import GlooCommunicator

    comm = GlooCommunicator(FileStore(store, size), rank, size)
    found = []
    for mib in wanted:
        x = np.full(int(mib * MIB) // 4, 1.0, np.float32)
        shards, whole = Float16(x, size), Float16(x, 1)
        begin = reuse()

        def allreduce(x=x):
            comm.allreduce(x)

        def scatter(codec=shards, begin=begin):
            allocate = begin()
            scatter_reduce(comm, codec, encode(codec, allocate), allocate)

        def gather(codec=whole, begin=begin):
            allocate = begin()
            encoded = encode(codec, allocate)
            allgather_reduce(comm, codec, encoded, [encoded.nbytes] * size, allocate)

        kinds = {"allreduce": (allreduce, 1.0), "scatter_reduce": (scatter, 0.5)}
        kinds["allgather"] = (gather, 0.5)
        times = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):
            x[:] = 1.0
            for kind, (function, _) in kinds.items():
                comm.barrier()
                start = time.perf_counter()
                function()
                slowest = np.array([time.perf_counter() - start])
                comm.allreduce(slowest, ReduceOp.MAX)
                if turn:
                    times[kind].append(float(slowest[0]))
        for kind, (_, ratio) in kinds.items():
            found.append([kind, x.nbytes, ratio, statistics.median(times[kind])])
    if rank == 0:
        print(json.dumps(found))
    comm.close()


def measure(size, options):
    """Return the measurements of ``size`` hosts."""
    from netns import INTERFACE, Hosts

    wanted = sorted({*FITTED.get(size, ()), *HELD_OUT.get(size, ())})
    with tempfile.TemporaryDirectory() as directory, Hosts(size, options.mbit) as hosts:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        shared = [f"{directory}/store", options.rounds, *wanted]
        ranks = [
            hosts.popen(
                rank,
                [sys.executable, __file__, "--worker", *map(str, (rank, size, *shared))],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = [process.communicate()[0] for process in ranks]
        if any(process.returncode for process in ranks):
            raise SystemExit("a rank failed; see above")
    return [
        Measurement(Workload(kind, nbytes, size, ratio), seconds)
        for kind, nbytes, ratio, seconds in json.loads(outputs[0].splitlines()[-1])
    ]


def main():
    if sys.argv[1:2] == ["--worker"]:
        rank, size, store, rounds, *wanted = sys.argv[2:]
        worker(int(rank), int(size), store, int(rounds), [float(mib) for mib in wanted])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=1000, help="link rate (default 1000)")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--save", action="store_true", help="in benchmarks/results/")
    options = parser.parse_args()
    from netns import unavailable

    missing = unavailable()
    if missing:
        raise SystemExit(f"skipped: {missing}")
    sizes = sorted({*FITTED, *HELD_OUT})
    found = each(lambda size: measure(size, options), sizes, "{} ranks")
    measured = [measurement for of_size in found for measurement in of_size]
    known = [m for m in measured if m.workload.nbytes / MIB in FITTED.get(m.workload.ranks, ())]
    model = fit(known)
    constants = {name: float(f"{value:.3g}") for name, value in vars(model.constants).items()}
    print("constants (seconds a message, or a byte):", constants)
    rows = []
    for m in measured:
        said, load = model.predict(m.workload), m.workload
        row = {"collective": load.collective, "ranks": load.ranks, "mib": load.nbytes / MIB}
        row |= {
            "held_out": m not in known,
            "ms": m.seconds * 1e3,
            "predicted_ms": said.seconds * 1e3,
        }
        row |= {"low_ms": said.low * 1e3, "high_ms": said.high * 1e3}
        row["error"] = said.seconds / m.seconds - 1
        rows.append(row)
        print(
            f"{'held out' if row['held_out'] else 'fitted':8} {load.collective:14}"
            f" {load.ranks} ranks {row['mib']:7.3f} MiB {row['ms']:8.2f} ms,"
            f" predicted {row['predicted_ms']:8.2f}"
            f" ({row['low_ms']:.2f} to {row['high_ms']:.2f}) {row['error']:+.1%}"
        )
    errors = [abs(row["error"]) for row in rows if row["held_out"]]
    print(f"held out: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    for (kind, ranks), said in project(model, 400e6, (8, 64, 512, 4096), ratio=0.5).items():
        low, high = said.low, said.high
        print(f"400 MB, {kind}, {ranks} ranks: {said.seconds:.2f} s ({low:.2f} to {high:.2f})")
    if options.save:
        cpu = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
        about = {
            "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "mbit": options.mbit,
            "rounds": options.rounds,
        }
        kept = {"machine": about, "constants": constants, "rows": rows}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "costmodel.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
