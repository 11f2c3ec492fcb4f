"""Jobs from Python: ringlet.run, and connect() in programs that others have started."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched_jobs import (
    HAS_MPI,
    NEEDS,
    Launcher,
    Running,
    both,
    needs_torch,
)

from ringlet.ring.errors import LaunchError, TransportUnavailable
from ringlet.ring.functions import WorkerFailed, parcels, run
from ringlet.ring.launch import launch, start
from ringlet.ring.processes.torchrun import free_port
from ringlet.ring.rendezvous.connect import connect

pytestmark = [
    pytest.mark.preloaded("torch"),
    needs_torch,
]


# ringlet.run


@both
def test_run_returns_results_by_rank(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    def triple(base: int, *, more: list[int]) -> tuple[int, list[int]]:
        print("hello")
        return base + 3 * int(os.environ["RINGLET_RANK"]), more

    assert run(triple, (10,), {"more": [1]}, np=2, transport=transport) == [(10, [1]), (13, [1])]
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == [
        "[0]<stdout>: hello",
        "[1]<stdout>: hello",
    ]


def test_run_leaves_no_connection_for_the_interpreter_to_warn_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert run(os.getpid, np=1)
    assert "ResourceWarning" not in capfd.readouterr().err


def test_run_raises_what_a_rank_raised() -> None:
    def fail() -> None:
        if os.environ["RINGLET_RANK"] == "1":
            raise ZeroDivisionError("on purpose \udcff")
        while True:
            signal.pause()

    with pytest.raises(WorkerFailed, match="rank 1 raised") as caught:
        run(fail, np=2, transport="gloo")
    assert caught.value.rank == 1
    assert "ZeroDivisionError: on purpose" in caught.value.traceback
    assert "in fail" in caught.value.traceback
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.rank, str(again)) == (1, str(caught.value))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda: os._exit(0), "rank 0 ended without a result"),
        (lambda: os._exit(6), "rank 0 exited with code 6"),
        (lambda: os.kill(os.getpid(), 9), r"ended by signal 9 \(SIGKILL\)"),
        (lambda: sys.exit(0), "SystemExit"),
        (lambda: (i for i in ()), "cannot pickle 'generator'"),
        (lambda: (i for i in ()), "That is what the function returned, a generator"),
    ],
)
def test_run_says_when_there_is_no_result(fn: Callable[[], Any], words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        run(fn, np=1, transport="gloo")


def _forking() -> str:
    child = os.fork()
    if not child:
        return "of a child"
    os.waitpid(child, 0)
    return "of a rank"


def test_run_goes_by_what_ranks_return_and_not_their_forks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(_forking, np=2, transport="gloo") == ["of a rank"] * 2
    said = capfd.readouterr().err
    assert said.count("a process that the function has forked came back from it") == 2
    assert "Traceback" not in said


def test_an_environment_that_cannot_be_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "pass"]
    assert launch(command, 1, "gloo", env={"A": "b\0c"}) == 126
    assert "embedded null byte" in capfd.readouterr().err


class Leaves:
    """Something whose reading ends the program that reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (0,)


def test_run_outlives_a_result_that_would_end_it() -> None:
    with pytest.raises(LaunchError, match=r"result of rank 0 cannot be read: SystemExit\(0\)"):
        run(Leaves, np=1, transport="gloo")


def test_run_says_what_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="cannot be sent: cannot pickle 'generator'") as failed:
        run(print, ((i for i in ()),), transport="gloo")
    assert failed.value.__suppress_context__, "pickle's stack comes first"
    monkeypatch.setattr(parcels, "pickler", lambda: pickle)
    with pytest.raises(LaunchError, match=r"pip install 'ringlet\[run\]'"):
        run(lambda: 1, transport="gloo")
    monkeypatch.setattr(Running, "__module__", "__main__")
    with pytest.raises(LaunchError, match=r"main script; pip install 'ringlet\[run\]'"):
        run(Running, transport="gloo")


def test_run_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "pickler", lambda: pickle)
    names = run(os.getenv, ("RINGLET_SIZE",), np=1, transport="gloo")
    assert names == ["1"]


# connect()

JOIN = (
    "import numpy, sys\nfrom ringlet.ring.rendezvous.connect import connect\n"
    "for _ in range(2):\n    c = connect(); x = numpy.ones(3, numpy.float32); c.allreduce(x)\n"
    "    line = f'{c.name} {c.rank} {c.size} {int(x[0])}\\n'; c.close()\n"
    "sys.stdout.write(line)\n"
)


@both
def test_connect_under_ringlet_run(ringlet: Launcher, transport: str) -> None:
    returned, out, err = ringlet(JOIN, 2, transport, command=[sys.executable, "-c"]).end()
    assert returned == 0, err
    assert sorted(out.decode().splitlines()) == [
        f"[{n}]<stdout>: {transport} {n} 2 2" for n in range(2)
    ]


def outside(command: list[str], env: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """Run ``command`` to its end; return code, sorted lines and errors."""
    mark = uuid.uuid4().hex
    returned, out, err = Running(command, mark, env or {}).end()
    return returned, sorted(out.decode().splitlines()), err.decode()


def test_connect_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # The user's own process group shares torchrun's store with ours.
    own = "import torch.distributed as d; d.init_process_group('gloo')\n"
    script.write_text(own + JOIN + "d.destroy_process_group()\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    returned, out, err = outside([*torchrun, "--standalone", str(script)])
    assert returned == 0, err
    assert out == ["gloo 0 2 2", "gloo 1 2 2"]


def test_connect_with_torchruns_variables_alone() -> None:
    env = {"WORLD_SIZE": "1", "RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = "import torch.distributed as d\n"
    end = "d.init_process_group('gloo'); d.destroy_process_group()\n"
    returned, out, err = outside([sys.executable, "-c", own + JOIN + end], env)
    assert returned == 0, err
    assert out == ["gloo 0 1 1"]


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
def test_connect_under_plain_mpiexec() -> None:
    program = start.mpiexec()
    assert program is not None
    returned, out, err = outside([program, "-n", "2", sys.executable, "-c", JOIN])
    assert returned == 0, err
    assert out == ["mpi 0 2 2", "mpi 1 2 2"]


FAIL = (
    "import atexit\nfrom ringlet.ring.rendezvous.connect import connect\nc = connect()\n"
    "atexit.register(print, 'bye')\nif c.rank == 1: raise ValueError('on purpose')\nc.barrier()\n"
)


@both
def test_an_exception_on_one_rank_ends_the_job(ringlet: Launcher, transport: str) -> None:
    returned, out, err = ringlet(FAIL, 2, transport, command=[sys.executable, "-c"]).end()
    assert returned == 1
    assert b"[1]<stdout>: bye\n" in out
    assert b"[1]<stderr>: ValueError: on purpose\n" in err
    assert b"ringlet run: rank 1 exited with code 1" in err  # whether others are left is chance


EXIT = """
import sys
import torch
import ringlet.torch as hvd
hvd.init()
if hvd.rank() == 1:
    sys.exit(3)
hvd.barrier()
"""


@both
def test_an_exit_code_is_returned_though_others_wait(ringlet: Launcher, transport: str) -> None:
    returned, _, err = ringlet(EXIT, 3, transport, command=[sys.executable, "-c"]).end()
    assert returned == 3
    assert b"ringlet run: rank 1 exited with code 3" in err


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
def test_an_exception_on_one_rank_ends_a_job_of_mpiexec() -> None:
    returned, out, err = outside([str(start.mpiexec()), "-n", "2", sys.executable, "-c", FAIL])
    assert returned == 1
    assert "bye" in out
    assert "ValueError: on purpose" in err


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=NEEDS["mpi"])])
def test_mpi_abort_decides_the_exit_code(ringlet: Launcher, transport: str) -> None:
    code = """
        import time
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            MPI.COMM_WORLD.Abort(7)
            time.sleep(600)  # MPICH's returns: whoever started the rank has to end it
        MPI.COMM_WORLD.Barrier()
    """
    code = textwrap.dedent(code)
    returned, _, err = ringlet(code, 2, transport, command=[sys.executable, "-c"]).end()
    assert returned == 7
    assert b"rank 1 called MPI_Abort with code 7; ending the other ranks\n" in err


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        {"RINGLET_RANK": "1", "RINGLET_SIZE": "3"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "1"},
    ],
)
def test_a_job_never_falls_apart_silently(env: dict[str, str]) -> None:
    code = "from ringlet.ring.rendezvous.connect import connect; connect()"
    env = {**env, "RINGLET_TRANSPORT": "mpi"}
    returned, _, err = outside([sys.executable, "-c", code], env)
    assert returned == 1
    assert "LaunchError: the launcher (" in err
    assert "says rank 1 of 3, transport 'mpi' sees rank 0 of 1: start the job with" in err


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("RINGLET_", "PMI", "OMPI_", "SLURM_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)
    return monkeypatch


def test_connect_alone(bare: pytest.MonkeyPatch) -> None:
    communicator = connect()
    assert (communicator.name, communicator.rank, communicator.size) == ("local", 0, 1)
    communicator.close()


def test_connect_says_what_is_missing(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="Did you mean 'mpi'"):
        connect("mpii")
    with pytest.raises(TransportUnavailable, match=r"NCCL|cupy|GPU"):
        connect("nccl")
    bare.setenv("PMI_RANK", "0")
    bare.setenv("PMI_SIZE", "2")
    with pytest.raises(LaunchError, match="set MASTER_ADDR to the host of rank 0"):
        connect("gloo")
    with pytest.raises(LaunchError, match="rank 0 of 2, transport 'local' sees rank 0 of 1"):
        connect("local")


MEETS = """
import os, sys
from ringlet.ring.rendezvous.connect import connect
communicator = connect("gloo")
communicator.barrier()
print("met", flush=True)
sys.stdin.read()
communicator.close()
"""


def _of_open_mpi(folder: Path, rank: int, job: str) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    env = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
    given = {**os.environ, **env, "PMIX_NAMESPACE": job, "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", MEETS], env=given, stdin=pipe, stdout=pipe)


def test_ranks_of_one_name_meet_though_a_job_that_was_killed_has_left_its_file(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare.setenv("RINGLET_LOG_LEVEL", "error")
    killed = _of_open_mpi(tmp_path, 0, "first")
    while sum(path.stat().st_size for path in tmp_path.glob("ringlet-*/*")) == 0:
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    assert list(tmp_path.glob("ringlet-*/*"))
    for job in ("first", "second"):  # what waits in the file would part the ranks of the first
        ranks = [_of_open_mpi(tmp_path, rank, job) for rank in range(2)]
        for each in ranks:
            assert each.stdout is not None
            assert each.stdout.readline() == b"met\n"
        if job == "first":  # and the second one finds the files of the first
            for each in ranks:
                each.kill()
        for each in ranks:
            each.communicate()
            assert job == "first" or each.returncode == 0
    assert not list(tmp_path.glob("ringlet-*/*"))


def test_a_meeting_place_of_somebody_else_is_refused(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare.setenv("TMPDIR", str(tmp_path))
    names = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_RANK", "COMM_WORLD_LOCAL_SIZE")
    for name, value in zip(names, "0202", strict=True):
        bare.setenv(f"OMPI_{name}", value)
    bare.setenv("PMIX_NAMESPACE", "job")
    open_to_all = tmp_path / f"ringlet-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        connect("gloo")
    shutil.rmtree(open_to_all)
    open_to_all.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        connect("gloo")
