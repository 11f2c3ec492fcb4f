"""Settings that every test shares."""

import functools
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Kernels compile on first use and the machines are busy: time is no evidence of anything here.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The gate tries the same examples every time; whoever develops tries new ones.
settings.register_profile("gate", settings.get_profile("default"), derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "default")

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
import kernel_cache  # noqa: E402, F401 - it names their folder, for every process

# TensorFlow reads it when it is imported; what a fork server has imported must have seen it too.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A process that crashes says where.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# Whoever wants no byte code compiles a thousand files of ours for each of a thousand programs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Two threads for products of a few thousand values wait for each other more than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Ranks compile a few functions of torch each: processes that do so take longer to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# XLA splits each program to compile it on many cores, which takes two thirds more of the cores. Its
# programs run for milliseconds, and LLVM takes seconds to make them fast: only where they compute
# what compressors do (test_jax_sharded.py) has it to, as for users.
XLA_FLAGS = ("--xla_cpu_parallel_codegen_split_count=1", "--xla_backend_optimization_level=0")
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
# Ranks compile the same programs. JAX locks the folder that it keeps them in if that is limited.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".kernels" / "jax"))
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

gc.disable()  # until all test files are imported: it walks all that they import, again and again
import fork_server  # noqa: E402 - when the environment is as every test finds it

PRELOADED = re.compile(r'preloaded\("(\w+)"')
SLOW_SERVERS = ("tensorflow", "jax")  # take seconds to start
# They compute, and never wait. By module, by compressor and by spec they are shared out.
SHARED = [f"tests/compressors/test_{name}.py" for name in ("broken", "kit", "written")]
ROOMS = ["ring", "frameworks", "fusion", "gpu", "compressors"]


@functools.cache
def server_of(path):
    """Return which of SLOW_SERVERS the tests in a file start programs from; "" for none."""
    found = PRELOADED.search(path.read_text())
    return found[1] if found and found[1] in SLOW_SERVERS else ""


def scope_of(nodeid, root):
    """Return what a worker runs together: a file, or part of it, or all files with one server."""
    path, _, test = nodeid.partition("::")
    if path in SHARED:
        return f"{path}::{test.partition('[')[2].rstrip(']').partition('-')[0]}"
    return server_of(root / path) or path


def pytest_collection_modifyitems(config, items):
    """Begin with what takes longest, so that no worker is alone in the end, and mix the rest.

    Ranks wait for each other: while files that start some do, others compute.
    """
    scopes = {}
    for item in sorted(items, key=lambda item: _place(ROOMS, item.path.parent.name)):
        scopes.setdefault(scope_of(item.nodeid, config.rootpath), []).append(item)
    slow = [scope for scope in SLOW_SERVERS if scope in scopes]
    computing = [scope for path in SHARED for scope in scopes if scope.startswith(f"{path}::")]
    waiting = [scope for scope in scopes if scope not in {*slow, *computing}]
    evenly = [((i + 0.5) / len(part), scope) for part in (computing, waiting)
              for i, scope in enumerate(part)]  # fmt: skip
    order = [*slow, *(scope for _, scope in sorted(evenly, key=lambda pair: pair[0]))]
    items[:] = [item for scope in order for item in scopes[scope]]


def _place(names, name):
    return names.index(name) if name in names else len(names)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep files together that start programs from one of SLOW_SERVERS: one worker starts it."""
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid, config.rootpath)

    return ByScope(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish():
    """Let the garbage collector pass over what test files have imported: a second, each time.

    And seldom over the rest: it took a tenth of the processors. Tests that need it call it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
    gc.enable()


def pytest_configure(config):
    config.began = time.monotonic()


@pytest.fixture(scope="session")
def servers():
    """Return the fork servers by framework; whoever needs one starts it."""
    running = {}
    yield running
    for server in running.values():
        server.close()


@pytest.fixture(scope="module", autouse=True)
def _preloaded(request, servers):
    """Let the Python programs of a module that is marked so start from a fork server."""
    mark = request.node.get_closest_marker("preloaded")
    if mark is None:
        yield
        return
    (framework,) = mark.args

    starting = threading.RLock()  # a test may start programs in several threads

    def server(which, of=framework):
        with starting:
            if (of, which) not in servers:
                base = server("", "torch") if (of, which) != ("torch", "") else None
                servers[of, which] = fork_server.Server(of, which, base)
            return servers[of, which]

    class Popen(fork_server.Popen):
        server_of = staticmethod(server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        if mark.kwargs.get("whole_end"):
            patch.setenv(fork_server.WHOLE_END, "1")
        yield


def pytest_unconfigure(config):
    """Say in one line what ran, what did not and why, and how long it took."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly or hasattr(config, "workerinput"):
        return
    count = {kind: len(reporter.stats.get(kind, [])) for kind in ("passed", "failed", "error")}
    whys = Counter(_why(report) for report in reporter.stats.get("skipped", []))
    minutes, seconds = divmod(round(time.monotonic() - config.began), 60)
    line = (
        f"Ringlet's tests: {count['passed']} passed, {count['failed'] + count['error']} failed, "
        f"in {minutes} min {seconds} s."
    )
    if whys:
        reasons = "; ".join(f"{n}: {why}" for why, n in whys.most_common())
        line += f" {whys.total()} did not run here ({reasons})."
    print(line)


def _why(report):
    """Return why a test was skipped, without what it tried."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").split(":")[0]
