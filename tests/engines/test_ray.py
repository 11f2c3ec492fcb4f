"""Ringlet on a real Ray: RayExecutor, and Ray Train's DataParallelTrainer."""

import os
import signal
import traceback

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "0"

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ringlet.ray import RayExecutor, RingletConfig
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    runtime = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=4, num_gpus=4, runtime_env=runtime, **options)
    yield
    ray.shutdown()


@pytest.fixture
def executor():
    made = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=3)
    made.start(extra_env_vars={"SEED": "7"})
    yield made
    made.shutdown()


def total(value):
    import torch

    import ringlet.torch as hvd

    hvd.init()
    reduced = hvd.allreduce(torch.full((8,), float(value + hvd.rank())), op=hvd.Sum)
    return float(reduced[0]), hvd.rank(), hvd.local_rank(), os.environ["SEED"], os.getpid()


def test_functions_run_as_ranks_and_what_they_initialised_stays(executor):
    first = executor.run(total, args=[1])
    assert [found[:4] for found in first] == [(6.0, rank, rank, "7") for rank in range(3)]
    assert executor.run(total, kwargs={"value": 0}) == [(3.0, *found[1:]) for found in first]
    assert ray.get(executor.run_remote(total, [2])) == [(9.0, *found[1:]) for found in first]


def size(_):
    import ringlet.torch as hvd

    hvd.init()
    return hvd.size()


def test_no_rank_trains_alone_after_a_failure_that_run_remote_told_of(executor):
    for reference in executor.run_remote(raise_on_one):
        with pytest.raises(WorkerFailed):
            ray.get(reference)
    with pytest.raises(WorkerFailed, match="an earlier call of run_remote failed on this rank"):
        executor.run(size, [None])
    assert executor.run(size, [None]) == [3] * 3


def raise_on_one():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError("the data of rank 1 are bad")
    hvd.allreduce(torch.ones(4), name="one that never ends")


def test_an_exception_arrives_with_its_traceback_and_the_actors_live_on(executor):
    before = {found[4] for found in executor.run(total, [1])}
    with pytest.raises(WorkerFailed, match="rank 1 raised") as failed:
        executor.run(raise_on_one)
    assert "in raise_on_one" in failed.value.traceback
    assert isinstance(failed.value.__cause__, ValueError)
    after = executor.run(total, [1])
    assert {found[4] for found in after} == before
    assert after[0][0] == 6.0


def end_one():
    import torch

    import ringlet.torch as hvd

    hvd.init()
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(4), name="one that never ends")


def test_a_worker_that_ends_is_named_and_a_new_start_works(executor):
    with pytest.raises(WorkerFailed, match=r"rank 2 has gone: its worker on .* ended"):
        executor.run(end_one)
    with pytest.raises(LaunchError, match="call start"):
        executor.run(total, [1])
    executor.start(extra_env_vars={"SEED": "8"})
    assert executor.run(total, [1])[0][0] == 6.0


class Trainer:
    def __init__(self, start, step=1):
        import ringlet.torch as hvd

        hvd.init()
        self.value, self.step, self.rank = start, step, hvd.rank()

    def advance(self):
        self.value += self.step
        return self.value, self.rank


def test_an_executable_lives_in_each_worker():
    executor = RayExecutor(RayExecutor.create_settings(), num_hosts=1, num_workers_per_host=2)
    executor.start(Trainer, executable_args=[10], executable_kwargs={"step": 2})
    try:
        assert executor.execute(lambda trainer: trainer.advance()) == [(12, 0), (12, 1)]
        assert executor.execute_single(lambda trainer: trainer.advance()) == (14, 0)
        assert executor.execute(lambda trainer: trainer.value) == [14, 12]
    finally:
        executor.shutdown()


def test_every_rank_sees_the_gpus_of_its_node():
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=2, use_gpu=True)
    executor.start()
    try:
        seen = executor.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    finally:
        executor.shutdown()
    assert seen[0] == seen[1]
    assert len(seen[0].split(",")) == 2


def test_too_few_resources_are_said():
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    executor = RayExecutor(settings, num_workers=2, cpus_per_worker=100)
    said = r"no room for 2 times 100 CPU: it has 4 CPU .* on 1 node; given up after 1 s"
    with pytest.raises(TimeoutError, match=said):
        executor.start()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, ValueError, "give num_workers, or num_hosts"),
        ({"num_workers": 2, "num_hosts": 1}, ValueError, "give num_workers, or num_hosts"),
        ({"num_workers": 0}, ValueError, "num_workers=0: there has to be at least one"),
        ({"num_workers": 2, "gpus_per_worker": 1}, ValueError, "use_gpu is false"),
        ({"num_workers": 2, "reset_limit": 1}, LaunchError, "give min_workers as well"),
    ],
)
def test_arguments_that_contradict_are_said(given, error, said):
    with pytest.raises(error, match=said):
        RayExecutor(RayExecutor.create_settings(), **given)


def test_network_interfaces_may_be_one_string():
    for nics in ("eth0,eth1", ["eth0", "eth1"], ("eth0", "eth1")):
        assert RayExecutor.create_settings(nics=nics).nics == ("eth0", "eth1")


def test_what_cannot_be_sent_is_said(executor):
    with pytest.raises(LaunchError, match="cannot be sent") as failed:
        executor.run(total, [(value for value in ())])
    assert failed.value.__suppress_context__, "pickle's stack comes first"
    assert traceback.extract_tb(failed.value.__traceback__)[-1].filename == __file__


# Ray Train


def train(config):
    import torch

    import ringlet.torch as hvd

    hvd.init()
    context = ray.train.get_context()
    assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.05),
        named_parameters=model.named_parameters(),
        compression="int8 | ef",
    )
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, f"rank{hvd.rank()}.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    inputs = torch.randn(64, 16, generator=generator)
    for step in range(begin, config["steps"]):
        if step == config.get("fail_at") and begin == 0 and hvd.rank() == 1:
            if config["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the data of rank 1 are bad")
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        folder = os.path.join(config["folder"], f"step{step}-{begin}")
        os.makedirs(folder, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, os.path.join(folder, f"rank{hvd.rank()}.pt"))
        hvd.barrier()
        kept = Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
        weights = model.weight.detach().flatten().tolist()
        ray.train.report({"loss": loss.item(), "begin": begin, "weights": weights}, checkpoint=kept)


def fit(tmp_path, workers=2, failures=0, env=None, **config):
    trainer = DataParallelTrainer(
        train,
        train_loop_config={"folder": str(tmp_path / "made"), **config},
        backend_config=RingletConfig(env=env or {}),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(tmp_path / "kept"),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    return trainer.fit()


def test_ray_train_gives_ranks_and_goes_on_with_residuals_after_a_worker_was_killed(tmp_path):
    whole = fit(tmp_path / "whole", steps=6, env={"RINGLET_SEED": "5"})
    assert whole.metrics["begin"] == 0
    broken = fit(
        tmp_path / "broken", steps=6, fail_at=3, how="kill", failures=1, env={"RINGLET_SEED": "5"}
    )
    assert 1 <= broken.metrics["begin"] <= 3  # Ray has taken what it had heard of
    # To the bit: what error feedback remembered came back too.
    assert broken.metrics["weights"] == whole.metrics["weights"]


def test_ray_train_shows_the_exception_of_the_rank_that_raised(tmp_path):
    with pytest.raises(Exception, match="the data of rank 1 are bad") as failed:
        fit(tmp_path, steps=3, fail_at=1, how="raise")
    assert "in train" in str(failed.value)


def test_what_cannot_be_is_said_before_ray_starts_anything():
    with pytest.raises(LaunchError, match="did you mean RINGLET_METRICS"):
        RingletConfig(env={"RINGLET_METRIC": "x"})
    with pytest.raises(LaunchError, match="transport 'mpi' cannot join ranks in the workers"):
        RingletConfig(transport="mpi")
