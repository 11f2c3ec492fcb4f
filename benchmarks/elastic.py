"""What elastic.run costs where nothing fails: the same training with it and without, by turns.

    python benchmarks/elastic.py                        # 2 ranks, 30 rounds
    python benchmarks/elastic.py --rounds 60 --save     # also writes benchmarks/results

In one elastic job over gloo every rank trains copies of one CNN with ``int8 | ef``: one in a plain
loop, the others inside ``elastic.run`` with a commit every --commit steps, with ``resume="step"``,
and with ``redundancy=1`` as well. They take turns of --steps steps, in another order each round. A
turn's time is that of its slowest rank, commits included, without the synchronisation with which
``elastic.run`` begins. The figure is the time of a turn divided by that of the plain turn in the
same round: the median of all rounds, and an interval that holds it with 95 % probability. So of the
time that all ranks' threads computed, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from ringlet.cli.progress import Progress

RESULTS = Path(__file__).parent / "results"
SPEC = "int8 | ef"
VARIANTS: dict[str, dict[str, Any]] = {
    "commit": {},
    "step": {"resume": "step"},
    "step and a copy": {"resume": "step", "redundancy": 1},
}
PLAIN = "plain"


def train(plan: dict[str, Any]) -> None:
    """Be one rank: train all copies by turns, and let rank 0 print how long each turn took."""
    import torch
    from torch.nn.functional import cross_entropy

    import ringlet.torch as hvd

    torch.set_num_threads(1)
    hvd.init()

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def since(began: tuple[float, float]) -> tuple[float, float]:
        wall, worked = now()
        return wall - began[0], worked - began[1]

    def step(model: Any, optimizer: Any, draw: Any) -> None:
        images = torch.randn(plan["batch"], 3, 32, 32, generator=draw)
        labels = torch.randint(10, (plan["batch"],), generator=draw)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(4),
            torch.nn.Flatten(), torch.nn.Linear(2048, 512), torch.nn.ReLU(),
            torch.nn.Linear(512, 10),
        )  # fmt: skip
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), SPEC)

    def plain() -> Any:
        model, optimizer = made()

        def turn() -> tuple[float, float]:
            draw = torch.Generator().manual_seed(hvd.rank())
            began = now()
            for _ in range(plan["steps"]):
                step(model, optimizer, draw)
            return since(began)

        return turn

    def elastic(options: dict[str, Any]) -> Any:
        model, optimizer = made()
        state = hvd.elastic.TorchState(model, optimizer, step=0)

        @hvd.elastic.run(**options)
        def turn(state: Any) -> tuple[float, float]:
            draw = torch.Generator().manual_seed(hvd.rank())
            began = now()
            for _ in range(plan["steps"]):
                step(model, optimizer, draw)
                state.step += 1
                if state.step % plan["commit"] == 0:
                    state.commit()
            return since(began)

        return lambda: turn(state)

    turns = {PLAIN: plain()} | {name: elastic(each) for name, each in VARIANTS.items()}
    order, shuffle = list(turns), random.Random(0)
    for number in range(-1, plan["rounds"]):  # one that does not count
        shuffle.shuffle(order)
        took = {}
        for name in order:
            hvd.barrier()
            walls, worked = zip(*hvd.allgather_object(turns[name]()), strict=True)
            took[name] = [max(walls), sum(worked)]
        if number >= 0 and hvd.rank() == 0:
            sys.stdout.write(json.dumps(took) + "\n")
            sys.stdout.flush()


def summary(ratios: list[float]) -> dict[str, Any]:
    """Return the median, and the order statistics that hold it with 95 % probability."""
    ordered, n = sorted(ratios), len(ratios)
    reach = round(0.98 * n**0.5)
    low, high = max(0, n // 2 - reach), min(n - 1, (n - 1) // 2 + reach)
    return {
        "ratio": round(statistics.median(ordered), 4),
        "interval": [round(ordered[low], 4), round(ordered[high], 4)],
    }


def main() -> int:
    """Run the job and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--commit", type=int, default=10, help="steps between commits")
    parser.add_argument("--batch", type=int, default=64, help="images of a rank in a step")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return 0
    names = ("rounds", "steps", "commit", "batch")
    plan = {name: getattr(options, name) for name in names}
    np = str(options.ranks)
    command = [sys.executable, "-m", "ringlet", "run", "--quiet", "--no-prefix", "-np", np]
    command += ["--min-np", np, sys.executable, __file__, "--train", json.dumps(plan)]
    rounds = []
    with (
        Progress(options.rounds) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job,
    ):
        progress.begin("round 1")
        for line in job.stdout:
            if line.startswith("{"):
                rounds.append(json.loads(line))
                progress.end()
                if not progress.finished:
                    progress.begin(f"round {len(rounds) + 1}")
    if job.returncode:
        return job.returncode
    found = {
        name: {
            kind: summary([each[name][i] / each[PLAIN][i] for each in rounds])
            for i, kind in enumerate(("time", "work"))
        }
        for name in VARIANTS
    }
    plain = statistics.median(each[PLAIN][0] for each in rounds) / options.steps
    print(f"a plain step takes {1000 * plain:.1f} ms; with elastic.run, a commit every "
          f"{options.commit} steps:")  # fmt: skip
    for name, kinds in found.items():
        said = [
            f"{each['ratio']:.3f} of its {kind} ({each['interval'][0]:.3f} to"
            f" {each['interval'][1]:.3f})"
            for kind, each in kinds.items()
        ]
        print(f"{name:<16} {', '.join(said)}")
    if options.save:
        about = (
            f"{options.ranks} ranks over gloo on {os.cpu_count()} cores, a CNN of 1.1M parameters, "
            f"{SPEC}, {options.rounds} rounds of {options.steps} steps, a commit every "
            f"{options.commit}, {date.today()}"
        )
        text = {"about": about, "milliseconds": round(1000 * plain, 2), "variants": found}
        (RESULTS / "elastic.json").write_text(json.dumps(text, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
