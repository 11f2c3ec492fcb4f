"""What run_gpu.py loads into pytest: what happened is known however the process ends."""

import contextlib
import json
import os
import time

import hang_watch
import pytest

GPU_LOST = 9  # how a process ends that can use the GPU no more


def inner(nodeid):
    """Return what of a test's id stands behind its file."""
    return nodeid.partition("::")[2]


class Finder:
    """Writes down which tests there are: the file and the inner id of each."""

    def __init__(self, path, _):
        self.path = path

    def pytest_collection_finish(self, session):
        with open(self.path, "w") as file:
            json.dump([(str(item.path), inner(item.nodeid)) for item in session.items], file)


class Journal:
    """Writes down which test began and how it ended, and tells of failures when they happen.

    A test that takes longer than ``limit`` seconds ends the process, which tells all stacks.
    """

    def __init__(self, path, limit):
        self.file, self.limit = open(path, "a"), limit  # noqa: SIM115 - until the process ends
        self.said = os.fdopen(os.dup(2), "w")  # where pytest holds nothing back
        self.synchronize, self.watch = None, contextlib.ExitStack()

    def note(self, *what):
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()

    def say(self, *lines):
        self.said.write("\n".join(lines) + "\n")
        self.said.flush()

    def pytest_runtest_logstart(self, nodeid):
        self.note("begun", inner(nodeid))
        self.outcome, self.why, self.began = "passed", "", time.monotonic()
        self.synchronize = None
        self.watch.enter_context(hang_watch.ended_after(self.limit, self.said))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        """Wait for the GPU at the end: what kernels did fails the test that launched them."""
        cupy = pyfuncitem.funcargs.get("cupy")
        self.synchronize = getattr(cupy.cuda.runtime, "deviceSynchronize", None) if cupy else None
        result = yield
        if self.synchronize is not None:
            self.synchronize()
        return result

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.outcome, self.why = "skipped", str(report.longrepr[2])
        if not report.failed:
            return
        text = report.longreprtext
        reasons = [line for line in text.splitlines() if line.startswith("E ")] or [text]
        if self.outcome != "failed":
            self.outcome, self.why = "failed", reasons[0].removeprefix("E ").strip()[:300]
        kept = [f"-- {name}\n{told}" for name, told in report.sections]
        self.say("", f"== {report.nodeid} ({report.when})", text, *kept)

    def pytest_runtest_logfinish(self, nodeid):
        self.watch.close()
        taken = round(time.monotonic() - self.began, 2)
        self.note("ended", inner(nodeid), self.outcome, self.why, taken)
        if self.outcome == "failed" and self.synchronize is not None:
            try:
                self.synchronize()
            except Exception as error:  # it stays until the process ends
                self.say(f"this process can use the GPU no more: {error}")
                os._exit(GPU_LOST)
