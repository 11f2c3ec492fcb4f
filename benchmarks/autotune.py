"""Whether the autotuner finds a good setting: beside a grid and random search, on a real engine.

    ringlet run -np 2 python benchmarks/autotune.py

The workload is a backward pass that hands in ResNet-50's gradients, scaled down, one by one. A grid
over fusion threshold and cycle time is measured; then Bayesian optimisation and random search start
from its worst corner with the same number of samples. What each found is measured once more, in
turns with the best grid point. Transactions have a latency, as on a network, by ``--latency-ms``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np
from engine import resnet_sizes
from lookahead import Slow

from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.tune.search import BayesianSearch, RandomSearch
from ringlet.fusion.tune.space import BOUNDS, from_unit, to_unit
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.connect import connect
from ringlet.ring.control_open import open_control

SETTLING = 3


class Workload:
    """One engine, and steps whose tensors arrive over time."""

    def __init__(self, comm, latency: float, scale: int, pause: float) -> None:
        self.engine = Engine(Slow(comm, latency), open_control, Limits())
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
            self.engine.hooks.settle()
        for _ in range(SETTLING):
            self.step()
        return self.nbytes / statistics.median(self.step() for _ in range(steps))


def searched(load, search, start, samples: int) -> list[tuple[dict, float]]:
    """Return (setting, score) of every sample, beginning with ``start``."""
    tried, setting = [], start
    for _ in range(samples):
        score = load.score(setting)
        tried.append((setting, score))
        search.tell(to_unit(setting, list(BOUNDS)), score)
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
    options = parser.parse_args()
    comm = connect(None)
    load = Workload(comm, options.latency_ms / 1e3, options.scale, options.pause_ms / 1e3)
    places = np.linspace(0, 1, options.grid)
    grid = [
        from_unit(dict(zip(BOUNDS, place, strict=True)))
        for place in itertools.product(places, repeat=2)
    ]
    scores = [load.score(setting) for setting in grid]
    corners = [i for i, s in enumerate(grid) if all(u in (0, 1) for u in corner(s))]
    worst = grid[min(corners, key=lambda i: scores[i])]
    top = grid[int(np.argmax(scores))]
    both = list(BOUNDS)
    searches = {
        "Bayesian optimisation": BayesianSearch(both, options.seed),
        "random search": RandomSearch(both, options.seed),
    }
    tried = {
        name: searched(load, search, worst, options.samples) for name, search in searches.items()
    }
    found = {name: max(t, key=lambda pair: pair[1])[0] for name, t in tried.items()}
    final: dict[str, list[float]] = {name: [] for name in ["grid", "worst", *found]}
    for _ in range(5):
        for name, setting in {"grid": top, "worst": worst, **found}.items():
            final[name].append(load.score(setting, 5))
    medians = {name: statistics.median(values) for name, values in final.items()}
    if comm.rank == 0:
        best = medians["grid"]
        print(f"{comm.size} ranks, {comm.name}, {options.latency_ms} ms a transaction")
        print(f"best of {len(grid)} grid points: {words(top)}, {best / 1e6:.1f} MB/s")
        print(f"worst corner: {words(worst)}, {medians['worst'] / best:.0%} of that")
        for name, setting in found.items():
            enough = samples_to(tried[name], 0.9 * best)
            print(
                f"{name}: {words(setting)}, {medians[name] / best:.0%} of the best grid point; "
                f"90% after {enough} of {options.samples} samples"
            )
    load.engine.shutdown()
    comm.close()


def corner(setting) -> list[float]:
    """Return a setting's place, rounded."""
    return [round(u, 2) for u in to_unit(setting, list(BOUNDS)).values()]


def words(setting) -> str:
    """Return a setting in words."""
    return f"{setting['fusion_threshold'] / 2**20:.2f} MiB, {setting['cycle_time'] * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
