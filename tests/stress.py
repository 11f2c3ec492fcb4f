"""Runs the tests that start processes many times, beside busy processors: `make stress`.

    python tests/stress.py [--times 30] [--busy 2] [--jobs 3] [TEST ...]

Prints a line a round, and at the end what failed how often; the exit status is 1 if anything did.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
ROOMS = ("ring", "fusion", "frameworks")  # whose tests start processes
SPIN = "while True: pass"


def play(tests: list[str], jobs: int) -> tuple[int, list[str]]:
    """Run ``tests`` once, ``jobs`` files at a time; return how many ran, and those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}"]
        if jobs > 1:  # as `make test` does
            command += ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
            command += ["--max-worker-restart", "0"]
        done = subprocess.run([*command, *tests], stdout=subprocess.PIPE, text=True, check=False)
        if not report.exists():
            raise SystemExit(done.stdout)
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [f"{c.get('classname')}::{c.get('name')}" for c in cases if _failed(c)]
    if wrong:
        print(done.stdout, file=sys.stderr)
    return sum(c.find("skipped") is None for c in cases), wrong


def _failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def main() -> int:
    """Run the rounds; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--busy", type=int, default=2, help="processes that do nothing but run")
    parser.add_argument("--jobs", type=int, default=3, help="test files at a time")
    parser.add_argument("tests", nargs="*", metavar="TEST")
    options = parser.parse_args()
    tests = options.tests or [str(TESTS / room) for room in ROOMS]
    failures: Counter[str] = Counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no busy loops
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(options.busy)]
    try:
        for number in range(1, options.times + 1):
            start = time.monotonic()
            ran, wrong = play(tests, options.jobs)
            failures.update(wrong)
            took = time.monotonic() - start
            print(f"round {number}: {ran} ran, {len(wrong)} failed, {took:.0f} s", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for name, times in failures.most_common():
        print(f"{times} of {options.times}: {name}")
    print(
        f"{len(failures)} tests failed in {options.times} rounds beside {options.busy} busy loops"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
