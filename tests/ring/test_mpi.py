"""The table of cases over real MPI processes."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ringlet.ring import TransportUnavailable
from ringlet.ring.dtypes import INTEGERS
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
