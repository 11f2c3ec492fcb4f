"""Children that a rank forks, and that end as programs do, leave the job alone."""

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
