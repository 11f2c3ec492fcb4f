"""One step of training over a slow link, with and without compression: what runs when.

    python benchmarks/step_timeline.py           # prints the lengths of the steps
    python benchmarks/step_timeline.py --save    # also writes benchmarks/results/step_timeline.json

Two hosts (network namespaces; needs root) with one rank each train the CNN of training_torch.py
over a shaped link. Each spec is a job of its own that writes a timeline; what is kept is rank 0's
step of median length: forward and backward, the engine's codec work, and what is on the wire.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import netns
from progress import each
from training_torch import Digits, cnn

RESULTS = Path(__file__).parent / "results"
SPECS = ("none", "int4 | ef")
SPANS = {"forward", "backward", "wait and step", "step"}


def run_rank(spec, steps):
    import torch

    import ringlet.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, task = cnn(), Digits(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=spec)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(steps):
        with hvd.timeline_span("step"):
            optimizer.zero_grad()
            with hvd.timeline_span("forward"):
                loss = task.loss(model, step, hvd.rank())
            with hvd.timeline_span("backward"):
                loss.backward()
            with hvd.timeline_span("wait and step"):
                optimizer.step()
    hvd.shutdown()


def median_step(path):
    """Return the spans of rank 0's step of median length, in ms from its beginning."""
    events = json.loads(path.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    events = [e for e in events if e.get("ph") == "X" and e.get("pid") == 0]
    whole = sorted((e for e in events if e["name"] == "step"), key=lambda e: e["ts"])[3:]
    middle = statistics.median_low([e["dur"] for e in whole])
    step = next(e for e in whole if e["dur"] == middle)
    spans = []
    for e in events:
        name = "communicate" if e["name"].startswith("communicate") else e["name"]
        kept = name in SPANS or name in ("compress", "decompress", "communicate")
        if kept and step["ts"] <= e["ts"] < step["ts"] + step["dur"]:
            start = (e["ts"] - step["ts"]) / 1e3
            spans.append({"name": name, "start": start, "end": start + e["dur"] / 1e3})
    return {"ms": middle / 1e3, "steps": len(whole), "spans": spans}


def measure(spec, hosts, steps):
    """Return the median step of a job on ``hosts``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        run = [sys.executable, "-m", "ringlet", "run", "--no-prefix", "--gloo"]
        run += ["-H", hosts.slots(1), "--rsh", hosts.rsh, "--network-interface", "v0"]
        run += [sys.executable, __file__, "--rank", spec, "--steps", str(steps)]
        env = os.environ | {"RINGLET_TIMELINE": str(path), "OMP_NUM_THREADS": "1"}
        subprocess.run(hosts.command(0, run), check=True, env=env)
        return median_step(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--rank", metavar="SPEC", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options.rank, options.steps)
        return
    if why := netns.unavailable():
        sys.exit(f"no network namespaces: {why}")
    found = {}
    with netns.Hosts(2, mbit=options.mbit) as hosts:
        steps = each(lambda spec: measure(spec, hosts, options.steps), SPECS)
        for spec, step in zip(SPECS, steps, strict=True):
            found[spec] = step
            print(f"{spec}: {step['ms']:.0f} ms a step, median of {step['steps']}")
    if options.save:
        about = f"2 hosts of 1 rank over gloo, {options.mbit:.0f} Mbit/s, CNN of 9.9M parameters, "
        about += f"batches of 256; {os.cpu_count()} cores; {date.today()}"
        text = json.dumps({"about": about, "mbit": options.mbit, "steps": found}, indent=1)
        (RESULTS / "step_timeline.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
