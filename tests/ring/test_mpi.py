"""The table of cases over real MPI processes."""

import json
import os
import runpy
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ringlet.ring import TransportUnavailable
from ringlet.ring.dtypes import INTEGERS
from ringlet.ring.transports import mpi_segments
from ringlet.ring.transports.local import run_local
from ringlet.ring.transports.mpi import MpiCommunicator

WORKER = Path(__file__).with_name("worker_collectives.py")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
OPEN_MPI = {  # which otherwise refuses root, and more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this virtual environment")
@pytest.mark.parametrize("size", [2, 4])
def test_the_table_of_cases(size, tmp_path):
    out = tmp_path / "digests.json"
    command = [MPIEXEC, "-n", str(size), sys.executable, WORKER, "mpi", out]
    env = os.environ | OPEN_MPI
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    digests = json.loads(out.read_text())
    local = run_local(runpy.run_path(str(WORKER))["play_all"], size)[0]
    exact = [case for case in local if any(f"dtype='{name}'" in case for name in INTEGERS)]
    assert len(exact) > 150
    assert {case: digests[case] for case in exact} == {case: local[case] for case in exact}


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this virtual environment")
@pytest.mark.parametrize("end", ["", "MPI.Finalize()"])
def test_a_program_may_leave_the_initialisation_of_mpi_to_us(end):
    """As Horovod's do that want to split COMM_WORLD; who ends MPI need not be us then."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "import numpy as np\n"
        "from ringlet.ring.transports.mpi import MpiCommunicator\n"
        "comm = MpiCommunicator()\n"
        "values = np.ones(3)\n"
        "comm.allreduce(values)\n"
        "comm.close()\n"
        "import os; os.write(1, f'{values.sum()} {MPI.Is_initialized()}\\n'.encode())\n"
        f"{end}"
    )
    done = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, env=os.environ | OPEN_MPI,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["6.0", "True"] * 2), done.stderr


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this virtual environment")
def test_ranks_that_are_killed_leave_no_shared_memory_and_others_end_well(tmp_path):
    code = (
        "import os, pathlib, signal, sys, numpy as np\n"
        "from ringlet.ring.transports.mpi import MpiCommunicator\n"
        "comm = MpiCommunicator()\n"
        "comm.barrier()\n"
        "named = [line.split()[-1] for line in open('/proc/self/maps') if '/mpich_shm_' in line]\n"
        "left = [path for path in named if os.path.exists(path)]\n"
        "values = np.ones(1 << 16, np.float32)\n"
        "comm.subset([0, 1]).allreduce(values)\n"
        "file = pathlib.Path(sys.argv[1], f'{sys.argv[2]}-{comm.rank}')\n"
        "file.write_text(f'{left} {values[-1]}')\n"
        "comm.barrier()\n"
        "if sys.argv[2] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
        "comm.close()\n"
    )
    for end in ("closed", "killed"):
        command = [MPIEXEC, "-n", "2", sys.executable, "-c", code, tmp_path, end]
        env = os.environ | OPEN_MPI
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
        said = [(tmp_path / f"{end}-{rank}").read_text() for rank in range(2)]
        assert said == ["[] 2.0"] * 2, result.stderr
        assert (result.returncode == 0) == (end == "closed")
        assert end == "killed" or not result.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_signals_do_what_they_did_before(name):
    """A library of MPICH's took them, and a job outlived its terminal."""
    code = (
        "import os, signal, sys\n"
        "from ringlet.ring.transports.mpi import MpiCommunicator\n"
        f"number = signal.{name}\n"
        "signal.signal(number, getattr(signal, sys.argv[1]))\n"
        "MpiCommunicator()\n"
        "os.kill(os.getpid(), number)\n"
        "print('still there')\n"
    )
    for before, code_then, said in (
        ("SIG_DFL", -getattr(signal, name), ""),
        ("SIG_IGN", 0, "still there\n"),
    ):
        command = [sys.executable, "-c", code, before]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (code_then, said), done.stderr


def test_only_names_of_mapped_segments_are_taken_away(monkeypatch, tmp_path):
    mapped, others, renewed = (Path(f"/dev/shm/mpich_shm_{uuid.uuid4().hex}_0") for _ in range(3))
    for path in (mapped, others, renewed):
        path.touch()
    line = "7f47c8636000-7f47c883c000 rw-s 00000000 00:1b {} {}\n"
    maps = tmp_path / "maps"
    maps.write_text(
        line.format(mapped.stat().st_ino, f"                  {mapped}") * 2
        + line.format(renewed.stat().st_ino + 1, renewed)  # another file has the name by now
        + line.format(others.stat().st_ino, f"{others} (deleted)")
        + "7f47c8636000-7f47c883c000 rw-p 00000000 00:00 0\n"
    )
    monkeypatch.setattr(mpi_segments, "_MAPS", maps)
    try:
        mpi_segments.take_names_away()
        assert [path.exists() for path in (mapped, others, renewed)] == [False, True, True]
    finally:
        for path in (mapped, others, renewed):
            path.unlink(missing_ok=True)
    monkeypatch.setattr(mpi_segments, "_MAPS", tmp_path / "nowhere")
    mpi_segments.take_names_away()


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'ringlet\[mpi\]'"):
        MpiCommunicator()


@pytest.mark.mpi
def test_without_an_mpi_library_the_error_says_what_to_install():
    code = (
        "from ringlet.ring.transports.mpi import MpiCommunicator\n"
        "from ringlet.ring import TransportUnavailable\n"
        "try: MpiCommunicator()\n"
        "except TransportUnavailable as error: print(error)"
    )
    environment = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    if result.stdout == "" and result.returncode == 0:
        pytest.skip("this mpi4py has its MPI library linked in")
    assert "pip install 'ringlet[mpi]'" in result.stdout, result.stderr
