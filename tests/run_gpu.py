"""Run what needs an NVIDIA GPU, so that one fault does not hide the rest; `make test-gpu` does it.

    sh tests/run_gpu.sh [--minutes M] [--jobs N] [--limit S] [--to FOLDER] [--save] [PYTEST ...]
    sh tests/run_gpu.sh --under "compute-sanitizer --error-exitcode 1" -k int8
    sh tests/run_gpu.sh --bench [--minutes M]

The tests of one function share a process. After an error that stays, such as an illegal address, a
process can use the GPU no more: it ends, and another one takes the tests that are left. So it is
after a crash, and after a test that takes longer than ``--limit``. What has not begun when
``--minutes`` are over is not run, and told. ``--save`` keeps the outcome, with the GPU and the
date, in benchmarks/results/, if anything ran. ``--bench`` runs the benchmarks for GPUs instead, and
saves what they measure there. ``--under`` names what runs the tests: arrays are allocated one by
one then, so that compute-sanitizer sees what is beside them. Without a GPU every test is skipped.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Several processes each, which wait for each other: these have the GPU for themselves, at the end.
JOBS = ("test_gpu_nccl.py", "test_gpu_torch.py", "test_gpu_tensorflow.py")
LIMIT, LIMIT_OF_JOBS = 150, 400  # seconds of one test
RESTARTS = 4  # of a group, whose tests are alike: more would end in the same way
SHOWN, TOLD = 3, 2500  # groups whose failures are printed at once, and the last characters of each
PACKAGES = (
    "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "torch", "nvidia-nccl-cu13",
    "nvidia-nccl-cu12", "pytest",
)  # fmt: skip
RUNNING = set()  # groups of processes
UNDER = []  # what runs the tests
OPTIONS = [
    "-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests" / "gpu"),
    "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:faulthandler",
    "-W", "ignore::pytest.PytestUnknownMarkWarning", "-m", "gpu",
]  # fmt: skip
BENCHMARKS = (["benchmarks/kernels.py", "--device", "cuda", "--save"],)


class Group:
    """The tests of one function, and how they ended: by their ids, (outcome, why, seconds)."""

    def __init__(self, file, ids, limit):
        self.file, self.ids, self.limit = file, ids, limit
        self.name = f"{file.name}::{ids[0] if len(ids) == 1 else ids[0].partition('[')[0]}"
        self.ended, self.said, self.seconds = {}, "", 0.0

    def run(self, folder, deadline):
        """Run the tests in a process, and in others what that one has left."""
        began, left, why = time.monotonic(), self.ids, "its processes ended too often"
        journal, log = (folder / f"{os.getpid()}.{id(self)}.{end}" for end in ("journal", "log"))
        for _ in range(1 + RESTARTS):
            if not left:
                break
            if time.monotonic() >= deadline:
                why = "there was no time left"
                break
            with open(log, "a") as said:
                ids = [f"{self.file}::{each}" for each in left]
                code = inside("Journal", journal, ids, said, deadline, self.limit)
            self.read(journal, code)
            before, left = left, [each for each in self.ids if each not in self.ended]
            if before == left:
                why = f"pytest ended with {code}"
                break
        self.ended |= dict.fromkeys(left, ("not run", why, 0))
        self.seconds, self.said = time.monotonic() - began, log.read_text() if log.exists() else ""
        for path in (journal, log):
            path.unlink(missing_ok=True)
        return self

    def read(self, journal, code):
        begun = None
        for line in journal.read_text().splitlines() if journal.exists() else ():
            what, each, *rest = json.loads(line)
            begun = each if what == "begun" else None
            if what == "ended":
                self.ended[each] = tuple(rest)
        journal.unlink(missing_ok=True)
        if begun is not None:
            over = "there was no time left" if code is None else f"the process ended with {code}"
            self.ended[begun] = "failed", f"{over} (a test may take {self.limit:g} s)", self.limit


def inside(plugin, path, args, said, deadline, limit=0.0):
    """Run pytest with a plugin of journal.py; return its code, None if it was late."""
    within = [*UNDER, sys.executable, __file__, "--within", plugin, str(path), str(limit)]
    return finish([*within, *args], deadline, said)


def finish(command, deadline, said):
    """Run a command in a group of processes; return its code, None if it was late."""
    process = subprocess.Popen(
        command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, process_group=0,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    RUNNING.add(process.pid)
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process.pid)
        process.wait()
        RUNNING.discard(process.pid)


def end(group):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def leave(number, _):
    """End all that runs, and this process: threads would wait for their tests."""
    for group in list(RUNNING):
        end(group)
    print(f"ended by {signal.Signals(number).name}", flush=True)
    os._exit(128 + number)


def collected(args, folder):
    """Return the file and the id of each test; end with what pytest says where there is none."""
    path, log = folder / f"{os.getpid()}.found", folder / f"{os.getpid()}.log"
    with open(log, "w") as said:
        code = inside("Finder", path, ["--collect-only", *args], said, time.monotonic() + 120)
    text, found = log.read_text(), path.read_text() if path.exists() else "[]"
    for each in (path, log):
        each.unlink(missing_ok=True)
    if code or found == "[]":
        sys.exit(f"{text}\npytest ended with {code}: there are no tests")
    return json.loads(found)


def grouped(tests, limit):
    """Return the groups of tests that may run beside others, and those that run alone."""
    groups = {}
    for file, each in tests:
        alone = file.endswith(JOBS)
        key = alone, file, each if alone else each.partition("[")[0]
        groups.setdefault(key, []).append(each)
    beside, behind = [], []
    for (alone, file, _), ids in groups.items():
        most = limit or (LIMIT_OF_JOBS if alone else LIMIT)
        (behind if alone else beside).append(Group(Path(file), ids, most))
    return sorted(beside, key=lambda group: len(group.ids)), behind  # what is short tells early


def about():
    """Return what machine this is, and what is installed."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        gpu = (done.stdout or done.stderr).strip().replace("\n", "; ")
    except (OSError, subprocess.TimeoutExpired) as error:
        gpu = f"unknown (nvidia-smi: {type(error).__name__})"
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {
        "date": datetime.date.today().isoformat(), "gpu": gpu, "cores": os.cpu_count(),
        "python": platform.python_version(), **found,
    }  # fmt: skip


def told(group):
    counts = Counter(outcome for outcome, _, _ in group.ended.values())
    cells = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{group.name:<90} {cells} in {group.seconds:.0f} s"


def tests(args, rest, folder, deadline):
    """Run all tests, or those named; return the exit code."""
    named = [arg for arg in rest if not arg.startswith("-") and Path(arg.split("::")[0]).exists()]
    where = [] if named else sorted(map(str, (ROOT / "tests" / "gpu").glob("test_gpu_*.py")))
    found = collected([*where, *rest], folder)
    if "--collect-only" in rest:
        print("\n".join(f"{file}::{each}" for file, each in found))
        return 0
    machine = about()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    beside, behind = grouped(found, args.limit)
    done, shown = [], 0
    for jobs, groups in (args.jobs, beside), (1, behind):
        with ThreadPoolExecutor(jobs) as pool:
            for group in pool.map(lambda each: each.run(folder, deadline), groups):
                done.append(group)
                print(told(group), flush=True)
                if any(how[0] == "failed" for how in group.ended.values()) and shown < SHOWN:
                    shown += 1
                    print(group.said[-TOLD:], flush=True)
    with open(folder / "log.txt", "w") as log:
        log.writelines(f"{told(group)}\n{group.said}\n" for group in done)
    ended = {f"{g.file.name}::{each}": how for g in done for each, how in g.ended.items()}
    counts = Counter(outcome for outcome, _, _ in ended.values())
    bad = {each: how for each, how in ended.items() if how[0] in ("failed", "not run")}
    reasons = Counter(why for outcome, why, _ in ended.values() if outcome == "skipped")
    for why, count in reasons.items():
        print(f"skipped {count}: {why}")
    for each, (outcome, why, _) in list(bad.items())[:25]:
        print(f"{outcome}: {each}: {why[:200]}")
    print(f"what they said: {folder / 'log.txt'}")
    summary = {name: counts[name] for name in ("passed", "failed", "skipped", "not run")}
    print(", ".join(f"{count} {name}" for name, count in summary.items()))
    if args.save and counts["passed"] + counts["failed"]:
        kept = machine | summary | {"groups": [told(g) for g in done], "bad": bad}
        (RESULTS / "gpu_tests.json").write_text(json.dumps(kept, indent=1) + "\n")
    return int(bool(bad))


def benchmarks(deadline):
    """Run the benchmarks; return the exit code."""
    print(", ".join(f"{name} {value}" for name, value in about().items()), flush=True)
    codes = []
    for benchmark in BENCHMARKS:
        codes.append(finish([sys.executable, *benchmark], deadline, sys.stdout))
        print(f"{' '.join(benchmark)}: ended with {codes[-1]}", flush=True)
    return int(any(code != 0 for code in codes))


def within(plugin, path, limit, args):
    """Run pytest in this process; return its exit code."""
    import pytest

    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import journal

    plugins = [getattr(journal, plugin)(path, float(limit))]
    options = [*OPTIONS, "--tb=short", "--no-summary", "-q"]
    return int(pytest.main([*options, *args], plugins=plugins))


def main():
    if sys.argv[1:2] == ["--within"]:
        sys.exit(within(*sys.argv[2:5], sys.argv[5:]))
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--jobs", type=int, default=max(1, min(6, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--limit", type=float, help="seconds of one test")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--under", default="", metavar="COMMAND")
    args, rest = parser.parse_known_args()
    UNDER.extend(shlex.split(args.under))
    os.environ |= {"GPU_TESTS_WITHOUT_POOL": "1"} if UNDER else {}
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    deadline = time.monotonic() + 60 * args.minutes
    args.to.mkdir(parents=True, exist_ok=True)
    sys.exit(benchmarks(deadline) if args.bench else tests(args, rest, args.to, deadline))


if __name__ == "__main__":
    main()
