"""Whether the autotuner finds a good setting: beside a grid and random search, on a real engine.

    ringlet run -np 2 --transport gloo python benchmarks/autotune.py
    ringlet run -np 4 --transport gloo python benchmarks/autotune.py --hosts 2

The workload is a backward pass that hands in ResNet-50's gradients, scaled down, one by one. A grid
over fusion threshold and cycle time is measured, with everything else as it is by default; then
Bayesian optimisation and random search begin at the worst corner of all that can be tuned here,
with the same number of samples. What each found is measured once more, in turns with the best grid
point. Collectives have a latency, as on a network, by ``--latency-ms``, unless all their ranks are
on one of ``--hosts``, by default a rank's own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np
from engine import resnet_sizes

from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.autotune.search import BayesianSearch, RandomSearch
from ringlet.fusion.autotune.space import from_unit, to_unit
from ringlet.fusion.autotune.tuned_limits import names, settled
from ringlet.ring.communicator import ReduceOp, Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.transports.hierarchical import two_levels

SETTLING = 3
NUMBERS = ["fusion_threshold", "cycle_time"]  # of the grid


class Network:
    """A communicator whose collectives take longer by a fixed time when they leave a host."""

    def __init__(self, inner, seconds: float, hosts: list[str]) -> None:
        self._inner, self._seconds, self._hosts = inner, seconds, hosts

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def sibling(self, number):
        found = self._inner.sibling(number)
        return found and Network(found, self._seconds, self._hosts)

    def subset(self, ranks):
        found = self._inner.subset(ranks)
        return found and Network(found, self._seconds, [self._hosts[rank] for rank in ranks])

    def allreduce(self, *args, **options):
        self._slow(self._inner.allreduce, *args, **options)

    def alltoall(self, *args, **options):
        self._slow(self._inner.alltoall, *args, **options)

    def allgather(self, *args, **options):
        self._slow(self._inner.allgather, *args, **options)

    def reduce_scatter(self, *args, **options):
        self._slow(self._inner.reduce_scatter, *args, **options)

    def _slow(self, call, *args, **options):
        call(*args, **options)
        if len(set(self._hosts)) > 1:
            time.sleep(self._seconds)


class Workload:
    """One engine, and steps whose tensors arrive over time."""

    def __init__(self, comm, scale: int, pause: float) -> None:
        self.engine = Engine(comm, open_control, Limits())
        sizes = [max(16, n // scale) for n in reversed(resnet_sizes())]
        self.requests = [Request(f"g{i}", shape=(n,), op=ReduceOp.SUM) for i, n in enumerate(sizes)]
        self.arrays = [np.ones(n, np.float32) for n in sizes]
        self.nbytes = sum(a.nbytes for a in self.arrays)
        self.pause = pause

    def step(self) -> float:
        """Return the seconds of one step on the slowest rank."""
        submit = self.engine.submit
        submit(Request("start", "barrier"), np.empty(0, np.float32)).wait()
        start = time.perf_counter()
        handles = []
        for i, (request, array) in enumerate(zip(self.requests, self.arrays, strict=True)):
            handles.append(submit(request, array))
            if i % 8 == 7:
                time.sleep(self.pause)  # a layer's backward
        for handle in handles:
            handle.wait()
        worst = np.array([time.perf_counter() - start])
        request = Request("slowest", dtype="float64", shape=(1,), op=ReduceOp.MAX)
        return float(submit(request, worst).wait()[0])

    def score(self, setting, steps: int = 7) -> float:
        """Return bytes per second by median; only rank 0's ``setting`` counts."""
        if self.engine.rank == 0:
            self.engine.tuning.announce(setting)
            self.engine.extensions.settle()
        for _ in range(SETTLING):
            self.step()
        return self.nbytes / statistics.median(self.step() for _ in range(steps))


def searched(load, search, start, samples: int) -> list[tuple[dict, float]]:
    """Return (setting, score) of every sample, beginning with ``start``."""
    tried, setting = [], start
    for _ in range(samples):
        score = load.score(setting)
        tried.append((setting, score))
        search.tell(to_unit(setting, list(start)), score)
        setting = from_unit(search.ask())
    return tried


def samples_to(tried, enough: float) -> str:
    """Return after how many samples one scored ``enough``."""
    for i, (_, score) in enumerate(tried, 1):
        if score >= enough:
            return str(i)
    return f"more than {len(tried)}"


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--grid", type=int, default=6)
    parser.add_argument("--latency-ms", type=float, default=1.0)
    parser.add_argument("--pause-ms", type=float, default=0.5)
    parser.add_argument("--scale", type=int, default=8, help="divides the gradients' sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=0, help="that ranks are said to be on")
    options = parser.parse_args()
    comm = connect(None)
    hosts = [str(rank * (options.hosts or comm.size) // comm.size) for rank in range(comm.size)]
    network = Network(comm, options.latency_ms / 1e3, hosts)
    network = two_levels(network, Topology.from_hosts(comm.rank, hosts))
    load = Workload(network, options.scale, options.pause_ms / 1e3)
    tuned = names(settled(Limits(autotune="all"), network).autotune)
    default = {name: getattr(load.engine.limits, name) for name in tuned}
    places = np.linspace(0, 1, options.grid)
    grid = [
        default | from_unit(dict(zip(NUMBERS, place, strict=True)))
        for place in itertools.product(places, repeat=2)
    ]
    top = max(((load.score(setting), i) for i, setting in enumerate(grid)))[1]
    ends = itertools.product((0.0, 1.0), repeat=len(tuned))
    corners = [from_unit(dict(zip(tuned, end, strict=True))) for end in ends]
    worst = min(((load.score(setting), i) for i, setting in enumerate(corners)))[1]
    searches = {
        "Bayesian optimisation": BayesianSearch(tuned, options.seed),
        "random search": RandomSearch(tuned, options.seed),
    }
    tried = {
        name: searched(load, search, corners[worst], options.samples)
        for name, search in searches.items()
    }
    found = {name: max(t, key=lambda pair: pair[1])[0] for name, t in tried.items()}
    finalists = {"grid": grid[top], "worst": corners[worst], **found}
    final: dict[str, list[float]] = {name: [] for name in finalists}
    for _ in range(5):
        for name, setting in finalists.items():
            final[name].append(load.score(setting, 5))
    medians = {name: statistics.median(values) for name, values in final.items()}
    if comm.rank == 0:
        best = medians["grid"]
        print(f"{comm.size} ranks, {comm.name}, {options.latency_ms} ms a collective")
        print(f"best of {len(grid)} grid points: {words(grid[top])}; {best / 1e6:.1f} MB/s")
        print(f"worst of {len(corners)} corners: {words(corners[worst])}; "
              f"{medians['worst'] / best:.0%} of that")  # fmt: skip
        for name, setting in found.items():
            enough = samples_to(tried[name], 0.9 * best)
            print(
                f"{name}: {words(setting)}; {medians[name] / best:.0%} of the best grid point, "
                f"90% after {enough} of {options.samples} samples"
            )
    load.engine.shutdown()
    network.close()


def words(setting) -> str:
    """Return a setting in words."""
    told = [
        f"{setting['fusion_threshold'] / 2**20:.2f} MiB",
        f"{setting['cycle_time'] * 1e3:.2f} ms",
    ]
    if "streams" in setting:
        told.append(f"{setting['streams']} stream(s)")
    told.append("cache" if setting["cache"] else "no cache")
    if "hierarchical" in setting:
        told.append("two levels" if setting["hierarchical"] else "flat")
    return ", ".join(told)


if __name__ == "__main__":
    main()
