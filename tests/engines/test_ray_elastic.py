"""Ranks that come and go on a Ray whose nodes do."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
from ray.cluster_utils import Cluster

import ringlet
from ringlet.ray import ElasticRayExecutor, RayExecutor
from ringlet.ring.errors import LaunchError

LIMIT = 120.0  # seconds; generous, nothing waits for it when all is well
SETTINGS = RayExecutor.create_settings(timeout_s=90)


@pytest.fixture
def cluster():
    options = {"include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **options})
    runtime = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    ray.init(address=found.address, log_to_driver=False, runtime_env=runtime)
    yield found
    ray.shutdown()
    found.shutdown()
    # With this file the next ray.init(num_cpus=...) would look for the cluster.
    Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)


def trained(folder, until, what="", after=0):
    """Train until ``until`` ranks have done so for ten steps; tell rank 0's sizes in ``folder``.

    Steps count once there have been ``after`` ranks.
    """
    import torch

    import ringlet.torch as hvd

    hvd.init()
    began = hvd.rank()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), "int8 | ef"
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0, over=0, most=0)

    @hvd.elastic.run
    def train(state):
        while state.over < 10:
            optimizer.zero_grad()
            model(torch.ones(3, 4) * (1 + hvd.rank())).sum().backward()
            optimizer.step()
            state.step += 1
            state.most = max(state.most, hvd.size())
            state.over += hvd.size() == until and state.most >= after
            if hvd.rank() == 0 and state.step >= 5:
                Path(folder, str(hvd.size())).touch()
            if what and state.step == 10 and hvd.size() == 2 and hvd.rank() == 1:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("this rank has had enough")
            time.sleep(0.02)
            state.commit()
        return [p.detach().tolist() for p in model.parameters()]

    weights = train(state)
    return began, hvd.size(), os.environ["HOROVOD_HOSTNAME"], os.environ.get("MINE"), weights


def seen(folder, size):
    limit = time.monotonic() + LIMIT
    while not (folder / str(size)).exists():
        assert time.monotonic() < limit, f"{size} ranks never trained"
        time.sleep(0.05)


def test_a_node_that_comes_brings_ranks_and_one_that_is_lost_takes_them_along(cluster, tmp_path):
    executor = RayExecutor(
        SETTINGS, num_workers=2, min_workers=2, max_workers=4, cooldown_range=(1, 2)
    )
    executor.start(extra_env_vars={"MINE": "yes"})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(executor.run, trained, [str(tmp_path), 3, "", 4])
        seen(tmp_path, 2)
        node = cluster.add_node(num_cpus=2)
        seen(tmp_path, 4)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        found = running.result(LIMIT)
    began, sizes, hosts, mine, weights = zip(*found, strict=True)
    assert (sizes, mine) == ((3,) * 3, ("yes",) * 3)
    assert began[:2] == (0, 1)  # those of the first node have stayed
    assert len(set(hosts)) == 2
    assert hosts[0] == hosts[1] != hosts[2]
    assert weights[0] == weights[1] == weights[2]
    executor.shutdown()
    limit = time.monotonic() + LIMIT
    while ray.available_resources().get("CPU", 0) < 3:
        assert time.monotonic() < limit, "CPUs were not given back"
        time.sleep(0.05)


def test_a_rank_that_is_killed_ends_alone(cluster, tmp_path):
    cluster.add_node(num_cpus=1)
    settings = ElasticRayExecutor.create_settings(min_np=1, max_np=2, num_proc=2, timeout_s=90)
    executor = ElasticRayExecutor(settings, cpus_per_slot=1)
    executor.start()
    # The ranks of a node go with the one that fails, unless too few would stay.
    found = executor.run(trained, args=(str(tmp_path), 1, "kill"))
    assert [(began, size) for began, size, *_ in found] == [(0, 1)]


def test_a_job_that_cannot_go_on_raises_what_its_rank_did(cluster, tmp_path):
    executor = RayExecutor(SETTINGS, min_workers=2, max_workers=2)
    executor.start()
    with pytest.raises(ringlet.WorkerFailed, match="this rank has had enough") as raised:
        executor.run(trained, [str(tmp_path), 9, "raise"])
    assert raised.value.rank == 1


def test_what_cannot_be_is_said(cluster):
    executor = RayExecutor(SETTINGS, min_workers=3, elastic_timeout=2)
    executor.start()
    with pytest.raises(LaunchError, match="3 ranks are needed; 0 are there, on hosts with 2"):
        executor.run(print)
    settings = ElasticRayExecutor.create_settings(min_np=1, elastic_timeout=1)
    large = ElasticRayExecutor(settings, cpus_per_slot=64)
    with pytest.raises(LaunchError, match="has not been started"):
        large.run(print)
    large.start()
    with pytest.raises(LaunchError, match="the engine has named no host within 1 s"):
        large.run(print)
    for call in (lambda: executor.execute(print), lambda: executor.run_remote(print)):
        with pytest.raises(LaunchError, match="where ranks come and go, call run"):
            call()
    with pytest.raises(LaunchError, match="executable_cls: ranks that come and go keep no obj"):
        executor.start(dict)
    for given, said in (
        ({"min_workers": 3, "max_workers": 2}, "min_workers 3 is more than max_workers 2"),
        ({"num_workers": 2, "reset_limit": 2}, "reset_limit is for ranks that come and go"),
        ({"min_workers": 0}, "min_workers takes a number of at least 1, not 0"),
    ):
        with pytest.raises(LaunchError, match=said):
            RayExecutor(SETTINGS, **given)
