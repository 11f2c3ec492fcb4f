"""Trains over a process set where ranks come and go: ``worker_elastic_sets.py PLAN``.

PLAN is a JSON object: how many ``batches``; ``until`` there are so many ranks; ``do``: by the rank
that a process had at its start, the batch at which it kills itself; ``again``: whether the process
set is added again for other ranks; ``resume``: "commit" or "step"; ``own``: whether each rank's
state holds something of its own; ``pair``: the ranks of the process set.
"""

import json
import os
import signal
import sys

import torch

import ringlet.torch as hvd

plan, started = json.loads(sys.argv[1]), int(os.environ["HOROVOD_RANK"])


def tell(**what):
    sys.stdout.write(json.dumps({"started": started, "rank": hvd.rank(), **what}) + "\n")
    sys.stdout.flush()


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)


torch.set_num_threads(1)
hvd.init()
pair = hvd.ProcessSet(plan["pair"])
hvd.add_process_set(pair)
torch.manual_seed(0)
model = torch.nn.Linear(100, 60)
tell(
    refused=[
        refused(lambda: hvd.compress_fsdp(model, "int8")),
        refused(lambda: hvd.compress_hsdp(model, "int8", None)),
    ]
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters(),
    "topk(ratio=0.1) | ef", process_set=pair,
)  # fmt: skip
state = hvd.elastic.TorchState(model, optimizer, batch=0, own=None)
if plan["again"]:
    state.register_reset_callbacks([lambda: hvd.add_process_set(pair)])


def trained():
    """Return what training has made: a weight, and its momentum."""
    momentum = optimizer.state.get(model.bias, {}).get("momentum_buffer")
    return [model.weight.norm().item(), None if momentum is None else momentum.norm().item()]


@hvd.elastic.run(resume=plan["resume"])
def train(state):
    norm = optimizer.residual_norm()
    tell(begins=state.batch, size=hvd.size(), residual=norm, trained=trained())
    if plan["own"]:
        state.own = started
    draw = torch.Generator().manual_seed(hvd.rank())
    while state.batch < plan["batches"] or hvd.size() != plan["until"]:
        if plan["do"].get(str(started)) == state.batch:
            os.kill(os.getpid(), signal.SIGKILL)
        if pair.included():
            optimizer.zero_grad()
            model(torch.randn(8, 100, generator=draw)).square().mean().backward()
            optimizer.step()
        state.batch += 1
        if state.batch % 10 == 0:
            tell(commits=state.batch, residual=optimizer.residual_norm(), trained=trained())
            state.commit()


train(state)
own = None
if pair.included():
    own = torch.equal(
        hvd.broadcast(model.weight.detach(), pair.ranks[0], process_set=pair), model.weight.detach()
    )
total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)  # last: no rank ends before the others
tell(done=True, equal=own, total=total.item())
