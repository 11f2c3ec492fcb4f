"""Adasum against its definition, in threads and in real processes."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import PeerLost
from ringlet.ring.collectives.adasum import adasum
from ringlet.ring.dtypes import FLOATS
from ringlet.ring.transports.local import run_local

pytestmark = pytest.mark.preloaded("torch")

PATH = Path(__file__).with_name("worker_adasum.py")
WORKER = runpy.run_path(str(PATH))
MPIEXEC = Path(sys.executable).with_name("mpiexec")


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.lists(st.integers(0, 40), max_size=6),
    st.sampled_from(FLOATS),
    st.integers(0, 99),
)
def test_any_number_of_ranks_equals_the_definition(size, lengths, dtype, seed):
    results = run_local(WORKER["play"], size, lengths, dtype, seed)
    assert all(r == results[0] for r in results)


def combine(vectors):
    def run(comm):
        own = np.array(vectors[comm.rank], np.float64)
        adasum(comm, own, [0, own.size])
        return own

    return run_local(run, len(vectors))[0]


def test_orthogonal_gradients_add_and_equal_ones_are_averaged():
    np.testing.assert_array_equal(combine(np.eye(4)), np.ones(4))
    np.testing.assert_allclose(combine([[3.0, -1.0]] * 4), [3.0, -1.0])
    np.testing.assert_array_equal(combine([[0.0, 0.0], [1.0, 2.0]]), [1.0, 2.0])


def test_the_order_for_three_ranks_is_the_documented_one():
    x, y, z = np.random.default_rng(0).normal(size=(3, 5))
    pair = WORKER["pair"]
    np.testing.assert_allclose(combine([x, y, z]), pair(pair(x, z), y), rtol=1e-12)


def test_a_nan_stays_in_its_tensor_and_reaches_every_rank():
    def run(comm):
        buffer = np.ones(6, np.float32)
        buffer[0] = np.nan if comm.rank == 2 else 1.0
        adasum(comm, buffer, [0, 2, 6])
        return buffer

    for buffer in run_local(run, 4):
        assert np.isnan(buffer[:2]).any()
        np.testing.assert_array_equal(buffer[2:], np.ones(4))


@pytest.mark.parametrize(
    ("buffer", "ends", "error", "match"),
    [
        (
            np.zeros(4, np.int32),
            [0, 4],
            TypeError,
            "float16, bfloat16, float32, float64, not int32",
        ),
        (np.zeros(4), [0, 3], ValueError, "from 0 to 4"),
        (np.zeros(4), [1, 4], ValueError, "from 0 to 4"),
        (np.zeros(4), [], ValueError, "from 0 to 4"),
        (np.zeros(4), [0, 3, 2, 4], ValueError, "ascend"),
        (np.zeros((2, 2)), [0, 4], ValueError, "flat"),
    ],
)
def test_bad_arguments_are_refused(buffer, ends, error, match):
    with pytest.raises(error, match=match):
        run_local(lambda comm: adasum(comm, buffer, ends), 1)


def test_a_lost_rank_is_named():
    def run(comm):
        if comm.rank == 1:
            return
        adasum(comm, np.ones(100), [0, 100])

    with pytest.raises(PeerLost, match="rank 1"):
        run_local(run, 3)


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this virtual environment")
def test_over_mpi():
    command = [MPIEXEC, "-n", "4", sys.executable, PATH, "mpi"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split()[-1] == run_local(WORKER["play_all"], 4)[0]


def test_over_gloo(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, PATH, "gloo", tmp_path / "store", str(rank), "3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * 3, "\n".join(outputs)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert outputs[0].split()[-1] == run_local(WORKER["play_all"], 3)[0]
