"""What compression saves on real links: allreduce over four hosts at 100 Mbit/s and 1 Gbit/s.

    python benchmarks/network.py                       # prints; needs root and iproute2
    python benchmarks/network.py --mbit 1000 --save    # also writes benchmarks/results/
    python benchmarks/network.py --hosts 2 --per-host 2    # and what two levels save

Hosts are network namespaces whose links are shaped (benchmarks/netns.py), so four ranks share this
machine's cores: codec times are those of a crowded machine. Runs of all contenders are interleaved;
a time is the slowest rank's, the figure its median. Wire bytes are counted by the interface and
have to be what the payload predicts. With several ranks on a host, rows "two-level" reduce inside
hosts first and compress what travels between them. The bound is wire bytes / measured link rate +
codec time.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import netns
import numpy as np
from progress import announce, follow

from ringlet.cli.progress import Progress
from ringlet.compressors import parse
from ringlet.fusion import Engine
from ringlet.fusion.requests.request import Request
from ringlet.job import session
from ringlet.ring import ReduceOp, Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.cost.link_probe import measure_links
from ringlet.ring.launch.machine import examine, versions
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.process_group import WINDOW

RESULTS = Path(__file__).parent / "results"
SPECS = ["none", "fp16", "int8", "int4", "topk(ratio=0.01)", "powersgd(rank=4)"]
RAW = "torch.distributed gloo"
LEVELS = "two-level: "
TARGETS = {
    100: {"fp16": 1.9, "int8": 3.6, "int4": 6.5, "topk(ratio=0.01)": 15, "powersgd(rank=4)": 30},
    1000: {"fp16": 1.8, "int8": 2.8, "int4": 4.5, "topk(ratio=0.01)": 5},
}
OVER_BOUND = 1.15  # times the bound that a contender may take
SLACK = 1.06  # headers and acknowledgements


def counters():
    statistic = Path("/sys/class/net") / netns.INTERFACE / "statistics"
    return [int((statistic / f"{way}_bytes").read_text()) for way in ("tx", "rx")]


def payload_bytes(compressor, shape):
    """Bytes of what is moved for one tensor: a payload, or the tensor itself."""
    n = int(np.prod(shape))
    traits = compressor.traits()
    if traits.combine == "rounds":  # both factors ride an allreduce
        return 4 * compressor.rank * sum(shape)
    if str(compressor) == "none":
        return 4 * n
    if traits.fixed_size:
        from ringlet.compressors.base.contract import storage

        return sum(storage(p.dtype).itemsize * p.elements for p in compressor.layout(n))
    return 8 * max(1, int(n * compressor.ratio))  # an index and a value each


def expected_bytes(compressor, shape, hosts, per_host, levels=False):
    """Bytes that a host has to send: what the collective moves, of the payload's size."""
    payload, size, traits = payload_bytes(compressor, shape), hosts * per_host, compressor.traits()
    if levels:
        gathered = traits.combine == "gather" and (traits.granularity is None or hosts == 2)
        return (hosts - 1) * payload * (1 if gathered else 2 / hosts)
    direct = per_host * (size - per_host)  # pairs of ranks, for one that is on this host
    if traits.combine == "rounds" or str(compressor) == "none":
        return 2 * (size - 1) / size * payload  # a ring leaves a host once
    # gloo does not add 16-bit floats, so that sums are scattered like what cannot be added.
    if traits.fixed_size and traits.granularity is not None and size > 2:
        ring = payload > WINDOW  # how gloo gathers the sums
        return (direct + (size - 1 if ring else direct)) / size * payload
    return (size - 1 if size * payload > WINDOW else direct) * payload


class Raw:
    """torch.distributed's allreduce over gloo, in a group of its own."""

    def __init__(self, comm, env):
        import torch
        import torch.distributed as dist

        from ringlet.ring.wire.kv_client import client, torch_store

        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=netns.INTERFACE)]
        options._timeout = timedelta(seconds=600)
        store = dist.PrefixStore("benchmark", torch_store(client(env)))
        self._torch, self._group = torch, gloo(store, comm.rank, comm.size, options)

    def __call__(self, values):
        self._group.allreduce([self._torch.from_numpy(values)]).wait()


def run_rank(options):
    comm = connect()  # for barriers and figures; the engine has one of its own
    session.init()
    engine = session.current().engine
    side = round((options.megabytes * (1 << 20) / 4) ** 0.5)
    rng = np.random.default_rng(comm.rank)
    source = rng.standard_normal(side * side, dtype=np.float32)
    values = np.empty_like(source)
    hosts = [name.decode() for name in comm.allgather_bytes(socket.gethostname().encode())]
    rate = statistics.median(link.rate for link in measure_links(comm, hosts, 1.0))
    compressors = {spec: parse(spec) for spec in options.specs}
    raw = Raw(comm, os.environ)
    engines = {"": engine}
    if options.per_host > 1:
        topology = Topology.from_hosts(comm.rank, hosts)
        two = HierarchicalCommunicator(comm.subset(range(comm.size)), topology)
        limits = replace(engine.limits, hierarchical=True)
        engines[LEVELS] = Engine(two, open_control, limits)

    def once(row):
        values[:] = source
        if row == RAW:
            raw(values)
            return
        spec = row.removeprefix(LEVELS)
        compressor = compressors[spec]
        request = Request(spec, shape=(side, side), op=ReduceOp.SUM, spec=str(compressor))
        engines[row.removesuffix(spec)].submit(request, values, None, compressor).wait()

    levels = [LEVELS + spec for spec in options.specs if LEVELS in engines]
    rows = {spec: [] for spec in [RAW, *options.specs, *levels]}
    for turn in range(options.runs + 1):
        if comm.rank == 0:
            announce(f"run {turn} of {options.runs}")
        for spec in rows:
            used = engines[LEVELS if spec in levels else ""]
            used.reset_stats()
            comm.barrier()
            before, begin = counters(), time.perf_counter()
            once(spec)
            spent = time.perf_counter() - begin
            comm.barrier()
            wire = max(b - a for a, b in zip(before, counters(), strict=True))
            stats = used.stats
            codec, moving = stats.compress_s + stats.decompress_s, stats.communicate_s
            told = comm.allgather_bytes(json.dumps([spent, wire, codec, moving]).encode())
            if turn:  # the first run compiles and connects
                rows[spec].append(
                    [max(column) for column in zip(*map(json.loads, told), strict=True)]
                )
    if comm.rank == 0:
        place = ((side, side), comm.size // options.per_host, options.per_host)
        wanted = {spec: expected_bytes(c, *place) for spec, c in compressors.items()}
        wanted |= {
            spec: expected_bytes(compressors[spec.removeprefix(LEVELS)], *place, levels=True)
            for spec in levels
        }
        wanted[RAW] = wanted["none"]
        Path(options.output).write_text(
            json.dumps({"rate": rate, "rows": rows, "expected": wanted, "bytes": source.nbytes})
        )
    for used in engines.values():
        used.shutdown()
    session.shutdown()
    comm.close()


def measure(mbit, options, progress):
    """Run the job on shaped hosts and return what rank 0 reports."""
    with netns.Hosts(options.hosts, mbit) as hosts, tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "rows.json")
        where = [
            "-H",
            hosts.slots(options.per_host),
            "--rsh",
            hosts.rsh,
            "--network-interface",
            netns.INTERFACE,
        ]
        # On these hosts alone, which are one machine, UCX would find shared memory.
        ucx = ["--env", "UCX_TLS=tcp,self", "--env", f"UCX_NET_DEVICES={netns.INTERFACE}"]
        run = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *where, *ucx]
        rank = [sys.executable, str(Path(__file__).resolve()), "--rank", "--output", output]
        rank += ["--megabytes", str(options.megabytes), "--runs", str(options.runs)]
        rank += ["--per-host", str(options.per_host), "--specs", *options.specs]
        command = [*run, "--transport", options.transport, *rank]
        follow(progress, f"{mbit} Mbit/s", hosts.command(0, command))
        return json.loads(Path(output).read_text())


def summary(mbit, found, per_host):
    """Return a row per contender, and what is wrong with the bytes that were counted."""
    plain = statistics.median(row[0] for row in found["rows"]["none"])
    rows, wrong = [], []
    for spec, runs in found["rows"].items():
        spent, wire, codec, moving = (
            statistics.median(column) for column in zip(*runs, strict=True)
        )
        bound = wire / found["rate"] + codec
        expected = found["expected"][spec]
        rows.append(
            {
                "spec": spec,
                "seconds": spent,
                "ratio": plain / spent,
                "target": TARGETS.get(mbit, {}).get(spec) if per_host == 1 else None,
                "wire_bytes": wire,
                "expected_bytes": expected,
                "codec_seconds": codec,
                "collective_seconds": moving,
                "bound_seconds": bound,
                "over_bound": spent / bound,
                "runs": [row[0] for row in runs],
            }
        )
        if not expected <= wire <= SLACK * expected + (1 << 18):
            wrong.append(f"{mbit} Mbit/s, {spec}: {wire:.0f} bytes on the wire, not {expected:.0f}")
    return rows, wrong


def table(mbit, found, rows):
    yield f"### {mbit} Mbit/s (measured: {8 * found['rate'] / 1e6:.0f} Mbit/s)"
    yield ""
    yield "| | median | x our fp32 | to reach | wire MB | codec | bound | over bound |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        target = f"{row['target']:g}" if row["target"] else "-"
        yield (
            f"| {row['spec']} | {1e3 * row['seconds']:.0f} ms | {row['ratio']:.2f} | {target}"
            f" | {row['wire_bytes'] / 1e6:.2f} | {1e3 * row['codec_seconds']:.0f} ms"
            f" | {1e3 * row['bound_seconds']:.0f} ms | {row['over_bound']:.2f} |"
        )
    yield ""


def shares(rows):
    """Say how much leaves a host over two levels, of what leaves it over one."""
    wire = {row["spec"]: row["wire_bytes"] for row in rows}
    for spec in wire:
        if spec.startswith(LEVELS):
            flat = wire[spec.removeprefix(LEVELS)]
            yield f"- {spec}: {wire[spec] / flat:.2f} of the flat scheme's bytes leave a host"
    yield ""


def verdicts(mbit, rows):
    for row in rows:
        if row["target"] and row["ratio"] < row["target"]:
            short = f"{row['ratio']:.2f} x instead of {row['target']:g} x"
            yield f"{mbit} Mbit/s, {row['spec']}: {short}"
        if row["spec"] != RAW and row["over_bound"] > OVER_BOUND:
            yield f"{mbit} Mbit/s, {row['spec']}: {row['over_bound']:.2f} x the bound"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000], help="rates of links")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each; gloo only")
    parser.add_argument("--megabytes", type=float, default=64, help="size of the tensor, MiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--transport", default="gloo", choices=["gloo", "mpi"])
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/network.*")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return run_rank(options)
    if why := netns.unavailable():
        return print(f"skipped: {why}")
    if options.per_host > 1 and options.transport != "gloo":
        parser.error("--per-host needs --transport gloo: it counts on what gloo sends to whom")
    if "none" not in options.specs:
        options.specs = ["none", *options.specs]
    cpu = next(finding.text for finding in examine({}) if finding.name == "cpu")
    about = (
        f"{options.hosts} hosts of {options.per_host} ranks over {options.transport},"
        f" {options.megabytes:g} MiB float32,"
        f" {options.runs} interleaved runs, TCP {netns.CONGESTION_CONTROL}; {cpu}; {date.today()}"
    )
    lines, results, short, wrong = [about, ""], {"about": about, "versions": versions()}, [], []
    with Progress(len(options.mbit) * (options.runs + 1)) as progress:
        measured = [measure(mbit, options, progress) for mbit in options.mbit]
    for mbit, found in zip(options.mbit, measured, strict=True):
        rows, problems = summary(mbit, found, options.per_host)
        lines += table(mbit, found, rows)
        if options.per_host > 1:
            lines += shares(rows)
        short += verdicts(mbit, rows)
        wrong += problems
        results[f"{mbit} Mbit/s"] = {"measured_bytes_per_s": found["rate"], "rows": rows}
    lines += ["Short of the target:", "", *[f"- {text}" for text in short or ["nothing"]]]
    print("\n".join(lines))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        name = "network" if options.transport == "gloo" else f"network-{options.transport}"
        name += f"-{options.hosts}x{options.per_host}" if options.per_host > 1 else ""
        (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
        title = "# Allreduce over shaped links (benchmarks/network.py)\n\n"
        (RESULTS / f"{name}.md").write_text(title + "\n".join(lines) + "\n")
    if wrong:
        sys.exit("the interface counted other bytes than expected:\n" + "\n".join(wrong))
    return None


if __name__ == "__main__":
    main()
