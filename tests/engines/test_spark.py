"""Ringlet on a real Spark: ``ringlet.spark.run``, on a local master and over Spark Connect."""

import os
import signal
import sys
import time
import traceback

import pytest

os.environ |= {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_LOCAL_HOSTNAME": "localhost",
    "OMP_NUM_THREADS": "1",
}

from pyspark.sql import SparkSession

import ringlet.spark
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed


@pytest.fixture(scope="module")
def spark():
    builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def total(value, step=1):
    import torch

    import ringlet.torch as hvd

    hvd.init()
    reduced = hvd.allreduce(torch.full((8,), float(value + step * hvd.rank())), op=hvd.Sum)
    os.environ["LEFT_BEHIND"] = "1"
    return float(reduced[0]), hvd.rank(), hvd.local_rank(), os.environ.get("SEED")


def test_a_function_runs_as_ranks(spark):
    found = ringlet.spark.run(total, args=(1,), kwargs={"step": 2}, num_proc=3, env={"SEED": "7"})
    assert found == [(9.0, rank, rank, "7") for rank in range(3)]


def test_without_a_number_there_are_as_many_as_spark_runs(spark):
    assert len(ringlet.spark.run(total, (1,))) == 4


def test_workers_are_left_as_they_were(spark):
    def state(_):
        yield "LEFT_BEHIND" in os.environ, "RINGLET_RANK" in os.environ, sys.exit.__module__

    found = spark.sparkContext.parallelize(range(4), 4).mapPartitions(state).collect()
    assert set(found) == {(False, False, "sys")}


def raise_on_one():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("the data of rank 1 are bad")
    hvd.allreduce(torch.ones(4), name="one that never ends")


def test_an_exception_arrives_with_its_traceback(spark):
    with pytest.raises(WorkerFailed, match="rank 1 raised") as failed:
        ringlet.spark.run(raise_on_one, num_proc=2)
    assert "in raise_on_one" in failed.value.traceback
    assert isinstance(failed.value.__cause__, ValueError)


def end_once(path, how):
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 1 and not os.path.exists(path):
        with open(path, "w"):
            pass
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("only once")
    return float(hvd.allreduce(torch.ones(4), op=hvd.Sum)[0])


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_what_fails_is_run_anew(spark, tmp_path, how):
    path = str(tmp_path / "once")
    assert ringlet.spark.run(end_once, (path, how), num_proc=2, restarts=1) == [2.0, 2.0]


def test_tasks_that_spark_ends_are_a_sentence(spark, tmp_path):
    with pytest.raises(LaunchError, match="Spark has ended the tasks") as failed:
        ringlet.spark.run(end_once, (str(tmp_path / "once"), "kill"), num_proc=2)
    assert "\n" not in str(failed.value)
    assert failed.value.__cause__ is None, "Java's stacks come first"
    assert traceback.extract_tb(failed.value.__traceback__)[-1].filename == __file__


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_proc": 5}, r"num_proc=5 ranks .* local\[4\] runs 4 tasks"),
        ({"num_proc": 0}, "at least one rank"),
        ({"use_mpi": True}, "MPI cannot start in Spark's tasks"),
        ({"stdout": sys.stdout}, "logs of Spark's executors"),
        ({"executable": "python3"}, "set PYSPARK_PYTHON"),
        ({"start_timeout": -1}, "start_timeout='-1' is no time"),
        ({"args": ((value for value in ()),)}, "cannot be sent"),
        ({"env": {"RINGLET_METRIC": "x"}}, "did you mean RINGLET_METRICS"),
    ],
)
def test_what_cannot_be_is_a_sentence(spark, given, said):
    with pytest.raises(LaunchError, match=said):
        ringlet.spark.run(total, **given)


def test_elastic_jobs_are_refused_with_the_way():
    with pytest.raises(LaunchError, match=r"use ringlet\.spark\.run\(fn, restarts=N\)"):
        ringlet.spark.run_elastic(total, args=(1,), num_proc=2, min_num_proc=1, max_num_proc=4)


def test_tasks_that_do_not_come_are_given_up(spark):
    # Three of the four slots are taken.
    import threading

    def sleep(_):
        time.sleep(20)
        yield 1

    busy = spark.sparkContext.parallelize(range(3), 3).mapPartitions(sleep)
    other = threading.Thread(target=busy.collect)
    other.start()
    time.sleep(2)
    with pytest.raises(TimeoutError, match="2 tasks did not run at once within 3 s"):
        ringlet.spark.run(total, (1,), num_proc=2, start_timeout=3)
    other.join()
    assert len(ringlet.spark.run(total, (1,), num_proc=2)) == 2


def test_ringlet_inside_sparks_torch_distributor(spark):
    from pyspark.ml.torch.distributor import TorchDistributor

    def in_distributor():
        import torch

        import ringlet.torch as hvd

        hvd.init()
        return float(hvd.allreduce(torch.ones(4) * hvd.rank(), op=hvd.Sum)[0]), hvd.size()

    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(in_distributor) == (1.0, 2)


CONNECT = """
import sys
from pyspark.sql import SparkSession
sys.path.insert(0, sys.argv[1])
import ringlet.spark

def train():
    import torch
    import ringlet.torch as hvd
    hvd.init()
    return float(hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)[0])

if __name__ == "__main__":
    session = SparkSession.builder.remote("local[3]").getOrCreate()
    print("connect gives", ringlet.spark.run(train, num_proc=3, spark=session))
    session.stop()
"""


def test_over_spark_connect(tmp_path):
    import subprocess

    script = tmp_path / "connect.py"
    script.write_text(CONNECT)
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=250
    )
    assert "connect gives [3.0, 3.0, 3.0]" in ran.stdout, ran.stderr[-3000:]
