"""What `make test-gpu` runs, on a machine that has pytest and little else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hostdevice
import jobs
import pytest

SCRIPT = Path(__file__).parents[1] / "run_gpu.sh"
MARKED = {
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if "pytestmark = pytest.mark.gpu" in path.read_text().splitlines()
}


def test_every_test_for_gpus_is_collected_where_hypothesis_is_missing(tmp_path):
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError('hidden by this test')\n")
    known = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        ["sh", str(SCRIPT), "--collect-only", "-q"],
        env=os.environ | {
            "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(tmp_path), known]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "",
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    found = {Path(line.split("::")[0]).name for line in done.stdout.splitlines() if "::" in line}
    assert MARKED
    assert found == MARKED


FAULTS = """
import os, threading, types
import pytest

pytestmark = [pytest.mark.gpu]
lost = []


def synchronize():
    if lost:
        raise RuntimeError("cudaErrorIllegalAddress")


@pytest.fixture
def cupy():
    runtime = types.SimpleNamespace(deviceSynchronize=synchronize)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))


@pytest.mark.parametrize("what", ["passes", "poisons", "fails", "crashes", "hangs", "is left"])
def test_kernels(what, cupy):
    if what == "poisons":
        lost.append(what)  # the host learns of it when it waits
    assert what != "fails", "numbers differ"
    if what == "crashes":
        os._exit(7)
    if what == "hangs":
        threading.Event().wait()


def test_skipped():
    pytest.skip("there is nothing here")
"""


def run(*args, timeout=120, **env):
    return subprocess.run(
        ["sh", str(SCRIPT), *map(str, args)], env=os.environ | {"PYTHON": sys.executable} | env,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def test_no_fault_hides_what_comes_behind_it(tmp_path):
    (tmp_path / "test_faults.py").write_text(FAULTS)
    done = run("--to", tmp_path / "out", "--limit", 5, tmp_path / "test_faults.py")
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert "2 passed, 4 failed, 1 skipped, 0 not run" in said
    assert "skipped 1: Skipped: there is nothing here" in said
    for what, why in (
        ("poisons", "RuntimeError: cudaErrorIllegalAddress"),
        ("fails", "AssertionError: numbers differ"),
        ("crashes", "the process ended with 7"),
        ("hangs", "the process ended with 1 (a test may take 5 s)"),
    ):
        assert f"test_kernels[{what}]: {why}" in said
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "this process can use the GPU no more: cudaErrorIllegalAddress" in log
    assert "in test_kernels" in log, "where it hangs"


def test_another_program_may_run_the_tests(tmp_path):
    (tmp_path / "test_under.py").write_text(
        "import os, pytest\npytestmark = [pytest.mark.gpu]\n"
        "def test_it():\n    assert os.environ['CHECKED'] == os.environ['GPU_TESTS_WITHOUT_POOL']\n"
    )
    done = run("--to", tmp_path, "--under", "env CHECKED=1", tmp_path / "test_under.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 0 failed" in done.stdout


def test_nothing_is_left_running_where_it_is_ended(tmp_path):
    (tmp_path / "test_waits.py").write_text(
        "import os, threading, pytest\npytestmark = [pytest.mark.gpu]\ndef test_it():\n"
        "    os.open(os.environ['PIPE'], os.O_WRONLY)\n    threading.Event().wait()\n"
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = ["sh", str(SCRIPT), "--to", str(tmp_path / "out"), str(tmp_path / "test_waits.py")]
    env = os.environ | {"PYTHON": sys.executable, "PIPE": str(pipe)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        with open(pipe) as ours:  # once the test has it too
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
            assert ours.read() == ""  # once the test has ended
        assert "ended by SIGTERM" in process.stdout.read()


def test_what_there_is_no_time_for_is_told(tmp_path):
    (tmp_path / "test_faults.py").write_text(FAULTS)
    done = run("--to", tmp_path / "out", "--minutes", 0, tmp_path / "test_faults.py")
    assert done.returncode == 1
    assert "0 passed, 0 failed, 0 skipped, 7 not run" in done.stdout
    assert "not run: " in done.stdout
    assert "there was no time left" in done.stdout


def test_ranks_of_a_job_that_fails_are_all_heard(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    os.mkfifo(tmp_path / "pipe")
    worker.write_text(
        "import os, sys, threading\n"
        "print('rank', os.environ['RANK'], 'is here', flush=True)\n"
        f"open({str(tmp_path / 'pipe')!r}, 'w' if os.environ['RANK'] == '0' else 'r')\n"  # both are
        "threading.Event().wait() if os.environ['RANK'] == '0' else sys.exit('it broke')\n"
    )
    monkeypatch.setattr(jobs, "GRACE", 1)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] of 2 failed") as found:
        jobs.run_ranks(worker, 2)
    text = str(found.value)
    assert "-- rank 0: did not end\nrank 0 is here" in text
    assert "-- rank 1: 1\nrank 1 is here\nit broke" in text


@pytest.mark.skipif(hostdevice.COMPILER is None, reason=hostdevice.REASON)
def test_tests_for_gpus_pass_where_kernels_run_on_the_host(tmp_path):
    here = Path(__file__).parent
    known = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    few = (
        "(variable and -100- and not True) or half or 63- or (capture and int8 and not stochastic)"
    )
    done = run(
        "--to", tmp_path, "--jobs", 2, "-k", few, here / "test_gpu_codecs.py",
        here / "test_gpu_modifiers.py", PYTHONPATH=known, PYTEST_PLUGINS="cupy_on_host",
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed, 0 skipped, 0 not run" in done.stdout
