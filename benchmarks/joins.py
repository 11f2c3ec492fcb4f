"""How soon a rank joins: from the announcement of its host to its first step.

    python benchmarks/joins.py                          # 10 joins
    python benchmarks/joins.py --joins 20 --save        # also writes benchmarks/results

One rank trains a small model with ``int8 | ef`` in an elastic job over gloo. A second host, this
machine by another name, is announced and taken back again and again. Each time its rank starts a
new process, whose program imports nothing but torch and Ringlet, and takes part in training. The
figures are medians: of the whole, and of its parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SPEC = "int8 | ef"
PAUSE = 0.05  # seconds that a step lasts
PARTS = (  # of a join, each until the next begins
    "the discovery script is asked again, and the program starts",
    "import torch",
    "import ringlet.torch",
    "init(), where kernels are loaded before it asks for a rank",
    "the model, and what the other rank's state is",
    "the first step",
)


def train() -> None:
    """Be one rank; print when each part was done, at its first step in every world."""
    moments = [time.monotonic()]
    import torch

    moments.append(time.monotonic())
    import ringlet.torch as hvd

    moments.append(time.monotonic())
    torch.set_num_threads(1)
    hvd.init()
    moments.append(time.monotonic())
    model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 9))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), SPEC)
    state = hvd.elastic.TorchState(model, optimizer)
    newcomer = [True]  # until the first step of this process

    @hvd.elastic.run
    def loop(state: Any) -> None:
        entered, steps = time.monotonic(), 0
        while True:
            began = time.monotonic()
            optimizer.zero_grad()
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            if steps == 0:
                told = {"size": hvd.size(), "newcomer": bool(newcomer), "work": time.process_time()}
                told["moments"] = [*moments, entered, time.monotonic()]
                newcomer.clear()
                sys.stdout.write(json.dumps(told) + "\n")
                sys.stdout.flush()
            steps += 1
            if steps % 10 == 0:
                state.commit()
            time.sleep(max(0.0, PAUSE - (time.monotonic() - began)))

    loop(state)


def joins(number: int) -> list[dict[str, Any]]:
    """Let a rank join so often; return the seconds of each part, of all, and of work."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts"

        def announce(text: str) -> None:
            new = hosts.with_suffix(".new")
            new.write_text(text)
            new.replace(hosts)

        announce("localhost:1\n")
        command = [sys.executable, "-m", "ringlet", "run", "--quiet", "--no-prefix", "-np", "1"]
        command += ["--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {hosts}"]
        command += [sys.executable, __file__, "--train"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None

            def told(size: int, newcomer: bool) -> dict[str, Any]:
                """Return what a rank says of its first step among ``size``."""
                for line in job.stdout or ():
                    said: dict[str, Any] = json.loads(line)
                    if (said["size"], said["newcomer"]) == (size, newcomer):
                        return said
                raise RuntimeError(f"the job ended with code {job.wait()}")

            try:
                told(1, True)
                for i in range(number):
                    time.sleep(1.3 + 0.137 * i)  # at any time between two looks at the script
                    began = time.monotonic()
                    announce("localhost:1\n127.0.0.1:1\n")
                    said = told(2, True)
                    moments = [began, *said["moments"]]
                    parts = [b - a for a, b in itertools.pairwise(moments)]
                    found.append({"parts": parts, "all": sum(parts), "work": said["work"]})
                    announce("localhost:1\n")
                    told(1, False)
            finally:
                job.terminate()
    return found


def main() -> int:
    """Run the job and print how long joins took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--joins", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train()
        return 0
    found = joins(options.joins)
    whole = sorted(each["all"] for each in found)
    middle = statistics.median(whole)
    print(f"{len(found)} joins: {middle:.2f} s in the median, {whole[0]:.2f} to {whole[-1]:.2f}")
    parts = {
        name: statistics.median(each["parts"][i] for each in found) for i, name in enumerate(PARTS)
    }
    for name, seconds in parts.items():
        print(f"{seconds:6.2f} s: {name}")
    work = statistics.median(each["work"] for each in found)
    print(f"{work:6.2f} s of processor time of the program until then")
    if options.save:
        about = f"{SPEC}, gloo, {os.cpu_count()} cores, {len(found)} joins, {date.today()}"
        seconds = {name: round(each, 2) for name, each in parts.items()}
        seconds |= {"all": round(middle, 2), "soonest": round(whole[0], 2)}
        seconds |= {"latest": round(whole[-1], 2), "work": round(work, 2)}
        text = json.dumps({"about": about, "seconds": seconds}, indent=1)
        (RESULTS / "joins.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
