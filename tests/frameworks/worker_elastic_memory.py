"""Trains with more memory than residuals, and tells what is left of it where ranks come and go.

    worker_elastic_memory.py PLAN

PLAN is a JSON object: ``kind``: "fp16" (masters, a loss scale), "diloco", "powersgd", "onebit"
(OneBitAdam) or "switched" (the compression), the last two from batch 15 on; how many ``batches``;
``until`` there are so many ranks; ``do``: by the rank that a process had at its start, the batch at
which it kills itself; ``resume``. With ``gradients`` all ranks have the same ones, so small that 16
bits hold them under the loss scale alone, and tell what masters are given of them.
"""

import hashlib
import json
import os
import signal
import sys

import torch

import ringlet.torch as hvd

plan = json.loads(sys.argv[1])
kind, started = plan["kind"], int(os.environ["HOROVOD_RANK"])
EVERY = 3  # local steps of DiLoCo: commits are between outer steps


def tell(**what):
    sys.stdout.write(json.dumps({"started": started, **what}) + "\n")
    sys.stdout.flush()


def digest(tensors):
    """Return a hash of tensors by name."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().float().numpy().tobytes())
    return found.hexdigest()


torch.set_num_threads(1)
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(100, 60), torch.nn.Linear(60, 5))
if kind == "fp16":
    hvd.apply_precision(model, "fp16(init=256, interval=7)")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(),
        "none" if plan.get("gradients") else "topk(0.1) | ef",
        precision="fp16(init=256, interval=7)",
    )  # fmt: skip
elif kind == "diloco":
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DiLoCo(inner, model.named_parameters(), EVERY, "topk(0.1) | ef")
elif kind == "onebit":
    optimizer = hvd.OneBitAdam(model.named_parameters(), lr=0.01, warmup=15)
else:
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(),
        "powersgd(rank=2) | ef",
    )  # fmt: skip
state = hvd.elastic.TorchState(model, optimizer, batch=0)


def memory():
    """Return what there is besides parameters and residuals."""
    found = {"model": digest(model.state_dict()), "steps": optimizer._ringlet.step}
    moments = optimizer.state.values()
    found["moments"] = digest(
        {f"{i}.{k}": v for i, s in enumerate(moments) for k, v in s.items() if torch.is_tensor(v)}
    )
    if kind == "fp16":
        masters = optimizer._ringlet_masters
        found["masters"] = digest({n: m for n, (_, m) in masters.pairs.items()})
        found["scale"], found["skipped"] = masters.scale.state_dict(), masters.skipped
    elif kind == "diloco":
        found["agreed"], found["inner steps"] = digest(optimizer._agreed), optimizer.steps
        outer = optimizer.outer.state.values()
        found["outer"] = digest({str(i): s["momentum_buffer"] for i, s in enumerate(outer) if s})
    return found


def factors():
    """Return how many factors PowerSGD has at hand."""
    states = optimizer._ringlet.memory.states.values()
    return sum(len({"left", "right"} & state.keys()) for state in states)


def given():
    """Return how far what masters are given is from this rank's gradients without their scale."""
    masters = optimizer._ringlet_masters
    own = [p.grad.float() / masters.scale.scale for p, _ in masters.pairs.values()]
    optimizer.synchronize()
    pairs = zip(own, masters.pairs.values(), strict=True)
    return max(((m.grad - g).norm() / g.norm()).item() for g, (_, m) in pairs)


@hvd.elastic.run(resume=plan.get("resume", "commit"), redundancy=1)
def train(state):
    norm = optimizer._ringlet.memory.norm()
    tell(begins=state.batch, size=hvd.size(), memory=memory(), residual=norm, factors=factors())
    draw = torch.Generator().manual_seed(0 if plan.get("gradients") else hvd.rank())
    while state.batch < plan["batches"] or hvd.size() != plan["until"]:
        if plan["do"].get(str(started)) == state.batch:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "switched" and state.batch == 15:
            optimizer.set_compression("topk(0.1) | ef")
        optimizer.zero_grad()
        loss = model(torch.randn(8, 100, generator=draw)).float().square().mean()
        if plan.get("gradients"):
            loss = loss * 2.0**-14
        (optimizer.scale(loss) if kind == "fp16" else loss).backward()
        if plan.get("gradients"):
            tell(given=given(), size=hvd.size())
        optimizer.step()
        state.batch += 1
        if state.batch % 10 == 0:
            told = memory(), optimizer._ringlet.memory.norm(), factors()
            tell(commits=state.batch, memory=told[0], residual=told[1], factors=told[2])
            state.commit()


train(state)
alike = optimizer._agreed if kind == "diloco" else model.state_dict()
tell(done=True, equal=bool(hvd.replicas_equal(alike)))
