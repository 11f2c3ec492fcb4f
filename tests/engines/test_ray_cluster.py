"""Ringlet on a Ray of two nodes: where ranks are placed, and how they are numbered."""

import os
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
from ray.cluster_utils import Cluster

from ringlet.ray import RayExecutor


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    options = {"include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **options})
    cluster.add_node(num_cpus=3)
    runtime = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=runtime)
    yield
    ray.shutdown()
    cluster.shutdown()
    # With this file the next ray.init(num_cpus=...) would look for the cluster.
    Path("/tmp/ray/ray_current_cluster").unlink(missing_ok=True)


def place():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    total = float(hvd.allreduce(torch.ones(2), op=hvd.Sum)[0])
    local = hvd.local_rank(), hvd.local_size()
    return ray.get_runtime_context().get_node_id(), hvd.rank(), local, total


def placed(**given):
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=90), **given)
    executor.start()
    try:
        return executor.run(place)
    finally:
        executor.shutdown()


def test_ranks_are_spread_over_nodes_and_neighbours_follow_each_other():
    nodes, ranks, local, totals = zip(*placed(num_hosts=2, num_workers_per_host=2), strict=True)
    assert ranks == (0, 1, 2, 3)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert local == ((0, 2), (1, 2), (0, 2), (1, 2))
    assert set(totals) == {4.0}


def test_ranks_are_packed_and_numbered_by_node():
    nodes, ranks, local, _ = zip(*placed(num_workers=5), strict=True)
    assert ranks == (0, 1, 2, 3, 4)
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    assert sorted(counts) == [2, 3]
    assert [node for node, count in zip(dict.fromkeys(nodes), counts, strict=True)
            for _ in range(count)] == list(nodes)  # fmt: skip
    assert [at for at, _ in local] == [i for count in counts for i in range(count)]


def test_hosts_that_are_not_there_are_said():
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_hosts=3)
    said = r"no room for 3 times 1 CPU, each on a node of its own: it has 6 CPU .* on 2 nodes"
    with pytest.raises(TimeoutError, match=said):
        executor.start()
