"""Children that a rank forks or spawns leave the job alone, and are told that they are no ranks."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.preloaded("torch", whole_end=True)

PROGRAM = """
import os, sys
import torch
import ringlet.torch as hvd

hvd.init()
model = torch.nn.Linear(50, 50)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "int8 | ef"
)
hvd.broadcast_parameters(model.state_dict())
for leave in (lambda: sys.exit(7), lambda: sys.exit(), hvd.shutdown, lambda: None):
    optimizer.zero_grad()
    model(torch.ones(2, 50)).square().sum().backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        leave()
        break
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    print("replicas", hvd.replicas_equal(model.state_dict()), flush=True)
"""


@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_a_forked_child_ends_and_the_job_goes_on(transport):
    job = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", transport]
    done = subprocess.run(
        [*job, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    told = [line for line in lines if line.startswith(("ended", "replicas"))]
    wanted = ["ended with 7", *["ended with 0"] * 3, "replicas True"]
    assert sorted(told) == sorted(wanted * 2), done.stdout


LOADS = """
import sys
import torch
import ringlet.torch as hvd

hvd.init()
data = torch.utils.data.TensorDataset(torch.ones(8, 4))

if __name__ == "__main__":
    hvd.shutdown()
    hvd.init()
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1]
    )
    for _ in range(2):
        for (rows,) in loader:
            hvd.allreduce(rows)
"""
OTHERS = """
import multiprocessing, os, sys
import torch
import ringlet.torch as hvd

def alone(numbers):
    for name in set(os.environ) - {"_RANK_OF_RINGLET"}:
        del os.environ[name]
    hvd.init()
    numbers.put(hvd.size())

if __name__ == "__main__":
    hvd.init()
    spawn = multiprocessing.get_context("spawn")
    numbers = spawn.Queue()
    child = spawn.Process(target=alone, args=(numbers,))
    child.start()
    print("a child's job has", numbers.get(timeout=60), flush=True)
    child.join()
    hvd.barrier()
"""


def run(tmp_path, program, transport, *arguments):
    script = tmp_path / "script.py"
    script.write_text(program)
    job = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", transport]
    return subprocess.run(
        [*job, sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("transport", "method"), [("gloo", "spawn"), ("gloo", "forkserver"), ("mpi", "spawn")]
)
def test_a_worker_that_runs_the_script_anew_is_no_rank(tmp_path, transport, method):
    done = run(tmp_path, LOADS, transport, method)
    assert done.returncode == 1, done.stderr
    assert "multiprocessing has started this process from rank " in done.stderr
    assert "call init() there" in done.stderr
    assert "DataLoader worker" in done.stderr  # each rank's own error


def test_a_spawned_child_may_be_a_rank_of_another_job(tmp_path):
    done = run(tmp_path, OTHERS, "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a child's job has 1") == 2


SPAWNS = """
import warnings

import torch.multiprocessing


def work(number):
    import ringlet.torch as hvd

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
    told = [str(each.message) for each in caught]
    print(number, any("spawn has started several processes" in text for text in told), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


def test_processes_of_torchs_spawn_are_told_that_each_is_a_job_of_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 False", "1 True"]
