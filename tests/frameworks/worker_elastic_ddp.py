"""Trains with DistributedDataParallel and a hook where ranks come and go.

    worker_elastic_ddp.py PLAN

PLAN is a JSON object: how many ``batches``; ``until`` there are so many ranks; ``spec``; ``kill``:
by the rank that a process had at its start, the batch in whose backward pass it kills itself;
``making``: the first rank that kills itself while its second DDP is made; ``resume`` and
``redundancy`` of elastic.run; ``plain``: whether the model has no buffers; ``keep``: whether ranks
go on with the DDP that they have; ``unknown``: whether the state does not hold the model.
"""

import gc
import json
import os
import signal
import sys
import time
import weakref

import elastic_residuals
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import ringlet.torch as hvd
from ringlet.ring.rendezvous.epochs import told_specs
from ringlet.torch.elastic.epoch_group import EpochGroup
from ringlet.torch.elastic.hook_memory import HookMemory, memory_of

plan, started = json.loads(sys.argv[1]), int(os.environ["HOROVOD_RANK"])


def tell(**what):
    sys.stdout.write(json.dumps({"started": started, **what}) + "\n")
    sys.stdout.flush()


class Net(torch.nn.Module):
    """With buffers, which DDP broadcasts in each step, and a layer that is not always used."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(100, 60)
        self.norm = torch.nn.Linear(60, 60) if plan.get("plain") else torch.nn.BatchNorm1d(60)
        self.last, self.spare = torch.nn.Linear(60, 20), torch.nn.Linear(20, 20)

    def forward(self, x, all_of_it):
        x = self.last(self.norm(self.first(x)))
        return self.spare(x) if all_of_it else x


torch.set_num_threads(1)
hvd.init()
tell(specs=told_specs())
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = hvd.elastic.TorchState(None if plan.get("unknown") else model, optimizer, batch=0)
hook = memory_of(model) if not plan.get("unknown") else HookMemory()
wrapped = []  # weak references to all DDPs so far


def residuals(of_sums):
    lengths = {name: p.numel() for name, p in model.named_parameters()}
    return elastic_residuals.residuals(lengths, hook.memory.states, of_sums)


def owed():
    return elastic_residuals.owed(residuals(hvd.size()), hvd.size())


def norm(of_sums):
    return float(np.linalg.norm(residuals(of_sums)))


def die(_):
    if plan.get("kill", {}).get(str(started)) == state.batch:
        tell(ends=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)


model.norm.weight.register_hook(die)  # behind the first buckets, before the last


class Deadly(EpochGroup):
    """A group whose rank is lost in the first broadcast: of parameters, as DDP is made."""

    def broadcast(self, tensors, opts=None):
        os.kill(os.getpid(), signal.SIGKILL)


def reduced():
    group = hvd.elastic.process_group()
    if plan.get("making") == started and wrapped:
        group = Deadly(group.runtime)
    # Small buckets, so that some are reduced when the rank is killed, and others are not.
    ours = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=0.01, find_unused_parameters=True
    )
    ours.register_comm_hook(*hvd.ddp_hook(plan["spec"]))
    wrapped.append(weakref.ref(ours))
    return ours


kept = []


@hvd.elastic.run(resume=plan.get("resume", "commit"), redundancy=plan.get("redundancy", 0))
def train(state):
    begins = {"rank": hvd.rank(), "size": hvd.size(), "batch": state.batch}
    tell(**begins, residual=norm(hvd.size()), owed=owed(), steps=hook.memory.steps)
    ours = kept[0] if kept else reduced()
    if plan.get("keep"):
        kept.append(ours)
    draw = torch.Generator().manual_seed(hvd.rank())
    first = True
    while state.batch < plan["batches"] or hvd.size() != plan["until"]:
        optimizer.zero_grad()
        x = torch.randn(8, 100, generator=draw)
        ours(x, state.batch % 2 == 1).square().mean().backward()
        optimizer.step()
        if first:
            tell(stepped=time.monotonic(), size=hvd.size())
        first = False
        state.batch += 1
        if state.batch % 10 == 0:
            less = norm(hvd.size() - 1)  # once there is one rank less
            equal = hvd.replicas_equal(model.named_parameters())
            tell(commits=state.batch, equal=equal, held=less, owed=owed(), size=hvd.size())
            state.commit()


for call in (hvd.elastic.process_group, lambda: hvd.ddp_hook("int8", process_group="torch's")):
    try:
        call()
    except ValueError as error:
        tell(refused=str(error))
train(state)
equal = hvd.replicas_equal(model.named_parameters())
gc.collect()
left = sum(made() is not None for made in wrapped)
tell(done=True, rank=hvd.rank(), size=hvd.size(), batch=state.batch, equal=equal, left=left)
