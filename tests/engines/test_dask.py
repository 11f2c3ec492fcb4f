"""Ringlet on a real Dask cluster of processes."""

import os
import signal
import traceback

import pytest
from distributed import Client, LocalCluster

import ringlet.dask
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed


@pytest.fixture(scope="module")
def client():
    options = {"processes": True, "dashboard_address": None}
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, **options) as cluster,
        Client(cluster) as made,
    ):
        yield made


def total(value, step=1):
    import torch

    import ringlet.torch as hvd

    hvd.init()
    reduced = hvd.allreduce(torch.full((8,), float(value + step * hvd.rank())), op=hvd.Sum)
    os.environ["LEFT_BEHIND"] = "1"
    return float(reduced[0]), hvd.rank(), hvd.local_rank(), os.environ.get("SEED")


def test_a_function_runs_as_ranks_and_workers_stay_as_they_were(client):
    for _ in range(2):
        found = ringlet.dask.run(client, total, (1,), {"step": 2}, env={"SEED": "7"})
        assert found == [(9.0, rank, rank, "7") for rank in range(3)]
    left = client.run(lambda: [n for n in os.environ if n in ("LEFT_BEHIND", "RINGLET_RANK")])
    assert set(map(tuple, left.values())) == {()}


def test_some_workers_are_enough(client):
    chosen = list(client.scheduler_info(n_workers=-1)["workers"])[:2]
    assert len(ringlet.dask.run(client, total, (1,), workers=chosen)) == 2


def raise_on_one():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("the data of rank 1 are bad")
    hvd.allreduce(torch.ones(4), name="one that never ends")


def test_an_exception_arrives_with_its_traceback(client):
    with pytest.raises(WorkerFailed, match="rank 1 raised") as failed:
        ringlet.dask.run(client, raise_on_one)
    assert "in raise_on_one" in failed.value.traceback
    assert isinstance(failed.value.__cause__, ValueError)


def alone(error):
    """Whether a user sees the sentence first, and no frames of ours below his own line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return error.__suppress_context__ and last.filename == __file__


def test_what_cannot_be_is_a_sentence(client):
    with pytest.raises(LaunchError, match="no worker tcp://nowhere:1"):
        ringlet.dask.run(client, total, workers=["tcp://nowhere:1"])
    known = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    with pytest.raises(LaunchError, match=f"names {known} 2 times"):
        ringlet.dask.run(client, total, workers=[known, known])
    with pytest.raises(LaunchError, match="cannot be sent") as failed:
        ringlet.dask.run(client, total, ((value for value in ()),))
    assert alone(failed.value)


def end_one():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(4), name="one that never ends")


def test_a_worker_that_ends_is_named(client):
    with pytest.raises(WorkerFailed, match=r"rank 2 has .*tcp://127\.0\.0\.1:\d+"):
        ringlet.dask.run(client, end_one)


def test_a_worker_that_ends_alone_is_named(client):
    """Nobody is left who could tell, and Dask waits for a worker with its address."""
    client.wait_for_workers(3)
    chosen = list(client.scheduler_info(n_workers=-1)["workers"])[:1]
    with pytest.raises(WorkerFailed, match=rf"rank 0 has gone: the worker {chosen[0]}"):
        ringlet.dask.run(client, lambda: os.kill(os.getpid(), signal.SIGKILL), workers=chosen)
