"""Training that loses ranks and hosts at random, beside the same training undisturbed.

    python benchmarks/chaos.py                                # 2 minutes, seed 0
    python benchmarks/chaos.py --minutes 30 --seed 7 --save   # also writes benchmarks/results/
    python benchmarks/chaos.py --minutes 10 --kinds kill      # or freeze, cut, leave, join
    python benchmarks/chaos.py --events 200 --kinds kill --every 2   # however long that takes

Four hosts (network namespaces; needs root) with a rank each train a CNN on digits in an elastic
job, whose launcher is on a fifth. At random a rank is killed or frozen, a host is cut off, left out
by the discovery script, or added again. Afterwards the same number of steps is trained by four
ranks that nobody disturbs. A step takes at least --step-ms, as if a GPU computed it: else ranks on
this machine's cores become faster when others leave.

With --events there is no undisturbed run: what counts is that all of them were recovered from.

Goodput is committed steps a second, as a part of those undisturbed. A recovery is counted from the
event to the survivors' next optimizer step; for a frozen rank and a cut host it includes
--heartbeat seconds until anybody can know, and it is from the change of the script for those that
leave or join. Ranks compare their parameters, bit by bit, at every commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import netns

from ringlet.cli.progress import Progress

RESULTS = Path(__file__).parent / "results"
HOSTS = 4
SPEC = "int8 | ef"
KINDS = ("kill", "freeze", "cut", "leave", "join")
AWAY = 5.0  # seconds until a host that was cut off is connected again
SETTLED = 60.0  # seconds that anything may take before it counts as a hang


def train(plan: dict[str, Any]) -> None:
    """Be one rank: train until rank 0 has seen the time or the steps of ``plan``."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy

    import ringlet.torch as hvd

    def tell(**what: Any) -> None:
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **what})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    torch.set_num_threads(1)
    hvd.init()
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model.named_parameters(), SPEC
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0, over=False)

    @hvd.elastic.run(resume=plan["resume"], redundancy=plan["redundancy"])
    def loop(state: Any) -> None:
        host = os.environ["HOROVOD_HOSTNAME"]
        tell(begun=state.step, size=hvd.size(), rank=hvd.rank(), host=host)
        while not state.over:
            began = time.monotonic()
            rows = np.random.default_rng([state.step, hvd.rank()]).integers(0, 1500, 32)
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            state.step += 1
            if hvd.rank() == 0:
                tell(step=state.step, size=hvd.size())
            if state.step % plan["commit"] == 0:
                equal = hvd.replicas_equal(model.state_dict())
                late = time.monotonic() >= plan["until"] or state.step >= plan["steps"]
                state.over = hvd.broadcast_object(late or os.path.exists(plan["end"]))
                if hvd.rank() == 0:
                    tell(committed=state.step, equal=bool(equal), size=hvd.size())
                state.commit()
            time.sleep(max(0.0, plan["seconds"] - (time.monotonic() - began)))

    loop(state)
    if hvd.rank() == 0:
        with torch.no_grad():
            loss = cross_entropy(model(images[1500:]), labels[1500:]).item()
        tell(over=state.step, loss=loss)


class Job:
    """An elastic job over ``hosts``, and what its ranks have told."""

    def __init__(
        self, hosts: netns.Hosts, folder: Path, plan: dict[str, Any], heartbeat: float
    ) -> None:
        self.hosts, self.told = hosts, []
        self._file = folder / "hosts"
        self.list(range(HOSTS))
        self._changed = threading.Condition()
        flags = ["--min-np", "1", "--max-np", str(HOSTS), "-np", str(HOSTS), "--no-prefix"]
        flags += ["--host-discovery-script", f"cat {self._file}", "--rsh", hosts.rsh]
        flags += ["--network-interface", netns.INTERFACE, "--heartbeat-seconds", str(heartbeat)]
        flags += ["--blacklist-cooldown-range", "1", "4"]
        command = [sys.executable, "-m", "ringlet", "run", *flags]
        self.said = (folder / "stderr").open("w+")
        self._job = hosts.popen(
            HOSTS,
            [*command, sys.executable, __file__, "--train", json.dumps(plan)],
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def list(self, hosts: Any) -> None:
        """Let the discovery script print ``hosts``."""
        self.listed = sorted(hosts)
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{self.hosts.names[host]}:1\n" for host in self.listed))
        new.replace(self._file)

    def _read(self) -> None:
        assert self._job.stdout is not None
        for text in self._job.stdout:
            if text.startswith("{"):
                with self._changed:
                    self.told.append(json.loads(text))
                    self._changed.notify_all()

    def lines(self, since: int, limit: float) -> Iterator[dict[str, Any]]:
        """Yield what ranks tell from line ``since`` on, until ``limit`` or the job's end."""
        while True:
            with self._changed:
                while len(self.told) <= since:
                    left = limit - time.monotonic()
                    if left <= 0 or not self._thread.is_alive():
                        return
                    self._changed.wait(min(left, 0.5))
                line = self.told[since]
            yield line
            since += 1

    def ranks(self) -> dict[str, int]:
        """Return the process of each host, of those that the last epoch has."""
        begun = [line for line in self.told if "begun" in line]
        last = begun[-1]["size"] if begun else 0
        return {line["host"]: line["pid"] for line in begun[-last:] if line["size"] == last}

    @property
    def running(self) -> bool:
        """Whether the job has not ended."""
        return self._job.poll() is None

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        code = self._job.wait()
        self._thread.join()
        return code


def disturb(job: Job, kind: str, draw: random.Random) -> dict[str, Any] | None:
    """Do what ``kind`` says; return what came of it, None where it is not possible just now."""
    names = job.hosts.names
    ranks = job.ranks()
    there = sorted(names.index(host) for host in ranks)
    away = sorted(set(range(HOSTS)) - set(job.listed))
    if kind == "join":
        if not away:
            return None
        host, since, at = draw.choice(away), len(job.told), time.monotonic()
        job.list([*job.listed, host])
        enough = len(there) + 1
    else:
        staying = [host for host in there if host in job.listed]
        if len(staying) < 2:
            return None
        host, since, at = draw.choice(staying), len(job.told), time.monotonic()
        enough = 1
        if kind == "leave":
            job.list(set(job.listed) - {host})
        elif kind == "cut":
            job.hosts.cut(host)
        else:
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            try:
                os.kill(ranks[names[host]], number)
            except ProcessLookupError:  # the last change is half told: this one is not of it
                return None
    recovered, epoch = None, False
    for line in job.lines(since, at + SETTLED):
        if line["at"] < at:
            continue
        epoch |= (
            "begun" in line and line["size"] >= enough and line["pid"] != ranks.get(names[host])
        )
        if epoch and "step" in line:
            recovered = line["at"] - at
            break
    if kind == "cut":
        time.sleep(max(0.0, at + AWAY - time.monotonic()))
        job.hosts.mend(host)
    over = not job.running or any("over" in line for line in job.told[since:])
    return {"kind": kind, "host": names[host], "recovered": recovered, "over": over}


def disturbed(
    hosts: netns.Hosts, options: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Train for the minutes that ``options`` give, with faults; return what happened."""
    draw = random.Random(options.seed)
    until = math.inf if options.events else time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        end = Path(folder) / "end"
        plan = _plan(options, until=until, steps=1 << 60, end=end)
        job = Job(hosts, Path(folder), plan, options.heartbeat)
        begun = any("step" in line for line in job.lines(0, until))
        events = []
        while begun and job.running:
            if not progress.finished:
                progress.begin(f"with faults, event {len(events) + 1}")
            time.sleep(min(draw.expovariate(1 / options.every), max(0.0, until - time.monotonic())))
            if time.monotonic() >= until - SETTLED / 6 or 0 < options.events == len(events):
                break
            kinds = draw.sample(options.kinds, len(options.kinds))
            found = next((e for k in kinds if (e := disturb(job, k, draw))), None)
            if found is not None:
                events.append(found)
                if options.events:
                    progress.end()
                progress.wipe()
                print(f"{found['kind']:>7} {found['host']}: {_seconds(found)}", flush=True)
        end.touch()
        code = job.end()
        job.said.seek(0)
        return {"events": events, "told": job.told, "code": code, "said": job.said.read()}


def undisturbed(hosts: netns.Hosts, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps without faults; return what happened."""
    with tempfile.TemporaryDirectory() as folder:
        plan = _plan(options, until=math.inf, steps=steps, end=Path(folder) / "end")
        job = Job(hosts, Path(folder), plan, options.heartbeat)
        code = job.end()
        job.said.seek(0)
        return {"told": job.told, "code": code, "said": job.said.read()}


def _plan(options: argparse.Namespace, until: float, steps: int, end: Path) -> dict[str, Any]:
    return {
        "until": until, "steps": steps, "end": str(end), "seconds": options.step_ms / 1000,
        "commit": options.commit, "resume": options.resume, "redundancy": options.redundancy,
    }  # fmt: skip


def _seconds(event: dict[str, Any]) -> str:
    took = event["recovered"]
    return (
        "the job was over"
        if took is None and event["over"]
        else (f"NOT within {SETTLED:.0f} s" if took is None else f"{took:.2f} s")
    )


def rate(told: list[dict[str, Any]]) -> float:
    """Return committed steps a second, from the first step to the last commit."""
    first = next(line for line in told if "step" in line)
    last = [line for line in told if "committed" in line][-1]
    return (last["committed"] - first["step"]) / (last["at"] - first["at"])


def report(
    chaos: dict[str, Any], calm: dict[str, Any] | None, options: argparse.Namespace
) -> list[str]:
    """Return the result as lines of Markdown."""
    lines = [
        "| event | how many | recovered | median s | p99 s | slowest s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in options.kinds:
        events = [e for e in chaos["events"] if e["kind"] == kind and not _cut_short(e)]
        took = [e["recovered"] for e in events if e["recovered"] is not None]
        late = sorted(took)[math.ceil(0.99 * len(took)) - 1] if took else 0.0
        middle = f"{statistics.median(took):.2f} | {late:.2f} | {max(took):.2f}" if took else "| |"
        lines.append(f"| {kind} | {len(events)} | {len(took)} | {middle} |")
    commits = [line for line in chaos["told"] if "committed" in line]
    different = sum(not line["equal"] for line in commits)
    runs = [chaos] if calm is None else [chaos, calm]
    ends = [next((x for x in run["told"] if "over" in x), None) for run in runs]
    losses = [f"{end['loss']:.4f}" if end else "none, the job failed" for end in ends]
    ranks = [line["size"] for line in chaos["told"] if "step" in line]
    begun = [line["begun"] for line in chaos["told"] if "begun" in line and line["rank"] == 0]
    furthest = [line["step"] for line in chaos["told"] if "step" in line]
    again = len(furthest) - len(set(furthest))
    lines += [
        "",
        f"- {commits[-1]['committed']} steps in {len(commits)} commits, by"
        f" {statistics.mean(ranks):.2f} ranks on average; replicas differed at {different}.",
        f"- {len(begun) - 1} times ranks were numbered anew; {again} steps were done twice.",
    ]
    if calm is not None:
        goodput = rate(chaos["told"]) / rate(calm["told"])
        lines += [
            f"- Goodput {100 * goodput:.1f} % of the steps of an undisturbed run in the same time.",
            f"- Held-out loss {losses[0]}; undisturbed, after as many steps, {losses[1]}.",
        ]
    return [*lines, f"- The job ended with code {chaos['code']}."]


def _cut_short(event: dict[str, Any]) -> bool:
    return event["recovered"] is None and event["over"]


def main() -> int:
    """Run both, print the table; the exit status is 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--events", type=int, default=0, help="so many, and no minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=15.0, help="mean seconds between events")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds without a sign")
    parser.add_argument("--step-ms", type=float, default=50.0, help="least time of a step")
    parser.add_argument("--commit", type=int, default=10, help="steps between commits")
    parser.add_argument(
        "--resume", choices=("commit", "step"), default="step", help="where survivors go on"
    )
    parser.add_argument("--redundancy", type=int, default=0, help="copies of residuals: 0 or 1")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train)
        return 0
    if missing := netns.unavailable():
        print(f"chaos.py: {missing}", file=sys.stderr)
        return 2
    with netns.Hosts(HOSTS + 1) as hosts, Progress(options.events or 2) as progress:
        chaos = disturbed(hosts, options, progress)
        commits = [line for line in chaos["told"] if "committed" in line]
        if not commits:
            progress.wipe()
            print(f"chaos.py: nothing was trained\n{chaos['said']}", file=sys.stderr)
            return 1
        calm = None
        if not options.events:
            progress.end()
            progress.begin("as many steps without faults")
            calm = undisturbed(hosts, options, commits[-1]["committed"])
    lines = report(chaos, calm, options)
    long = f"{options.events} events" if options.events else f"{options.minutes:g} minutes"
    copies = ", a copy of residuals at a neighbour" if options.redundancy else ""
    title = (
        f"{long}, seed {options.seed}, an event every {options.every:g} s on "
        f"average, heartbeat {options.heartbeat:g} s, `{SPEC}`{copies}, {os.cpu_count()} cores, "
        f"{date.today()}"
    )
    text = "\n".join([f"# Chaos: {title}", "", *lines])
    print(text)
    if options.save:
        name = "chaos-events.md" if options.events else "chaos.md"
        if not options.events and len(options.kinds) == 1:
            name = f"chaos-{options.kinds[0]}.md"
        (RESULTS / name).write_text(f"{text}\n")
    hung = [e for e in chaos["events"] if e["recovered"] is None and not e["over"]]
    failed = (
        hung
        or not chaos["events"]
        or chaos["code"]
        or (calm and calm["code"])
        or not all(line["equal"] for line in commits)
    )
    if failed:
        print(chaos["said"], file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
