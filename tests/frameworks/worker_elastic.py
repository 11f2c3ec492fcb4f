"""A small training that tells, as JSON lines, what becomes of it when ranks are lost, or come.

    worker_elastic.py FRAMEWORK PLAN

PLAN is a JSON object: ``batches`` to train; ``spec``; ``do``: by the rank that a process had at its
start, [batch, what], where what is the name of a signal to send itself, ``exit``, ``tell`` (nothing
more than when), or the network interface to take its host off the network by; ``hosts``: the
file that lists hosts, and what rank 0 writes to it, by the number of ranks there are; ``resume``:
"commit" or "step"; ``own``: whether each rank's state holds something of its own; ``redundancy``;
``groups`` of parameters; ``die``: by that first rank, [method of Copies, epoch, batch] in which to
kill itself; ``freeze``: the first rank that stops when it hears that hosts have changed;
``seated``: the one that stops when it has a rank of epoch 2, before it meets the others;
``joining``: the one that is sent a signal, which is named too, when it has met them there, and is
to join the control plane; ``torn``: [batch, fails, dies], the step in which the latter kills itself
when others than the former have finished it, and are to commit, of which they tell by ``fifo``;
``rate``: whether a reset callback sets the learning rate by the number of ranks; ``called``:
[waits, dies], the first ranks of which the latter kills itself in its first such callback, when
others than the former have been through theirs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import elastic_residuals
import numpy as np

from ringlet.job.elastic import HostsUpdatedInterrupt
from ringlet.job.residual_copies import Copies
from ringlet.ring.control import opening
from ringlet.ring.rendezvous import epochs
from ringlet.ring.rendezvous.epochs import told_specs

framework, plan = sys.argv[1], json.loads(sys.argv[2])
started = int(os.environ["HOROVOD_RANK"])


def tell(**what):
    line = {"started": started, "host": os.environ["HOROVOD_HOSTNAME"], **what}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def interfere(state):
    """Do to this process what the plan says."""
    batch, what = plan.get("do", {}).get(str(started), (None, None))
    if batch == state.batch:
        tell(ends=time.monotonic())
        if what == "exit":
            sys.exit(3)
        if what.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what != "tell":
            subprocess.run(["ip", "link", "set", what, "down"], check=True)
    wanted = plan.get("hosts", {}).get(str(hvd.size()))
    if wanted and hvd.rank() == 0:
        with open(plan["file"] + ".new", "w") as file:
            file.write(wanted)
        os.replace(plan["file"] + ".new", plan["file"])


def tear(state):
    """Lose a rank in the step that has ended here, for one other rank as if it had not."""
    batch, fails, dies = plan.get("torn", (None, None, None))
    if batch != state.batch or hvd.size() < 3:
        return
    if started == fails:
        hvd.barrier()
    with open(plan["fifo"], "r" if started == dies else "w"):  # each waits for the other
        if started == dies:
            os.kill(os.getpid(), signal.SIGKILL)


def finished(state):
    return state.batch >= plan["batches"] and hvd.size() == plan.get("until", hvd.size())


if plan.get("levels") == 2:  # what the launcher takes for two hosts are two to the ranks as well
    os.environ["RINGLET_NODE"] = os.environ["HOROVOD_HOSTNAME"]
    os.environ["RINGLET_HIERARCHICAL_ALLREDUCE"] = "1"
if plan.get("seated") == started:
    take_rank = epochs.take_rank

    def stop_when_seated(env):
        take_rank(env)
        if env["RINGLET_EPOCH"] == "2":
            os.kill(os.getpid(), signal.SIGSTOP)

    epochs.take_rank = stop_when_seated

if plan.get("joining", [None])[0] == started:
    join = opening.join

    def end_when_met(*args):
        if os.environ["RINGLET_EPOCH"] == "2":
            os.kill(os.getpid(), getattr(signal, plan["joining"][1]))
        return join(*args)

    opening.join = end_when_met

if framework == "torch":
    import torch

    import ringlet.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    tell(specs=told_specs())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 60), torch.nn.Linear(60, 5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        model.named_parameters(),
        plan.get("spec", "int8 | ef"),
        groups=plan.get("groups"),
    )
    state = hvd.elastic.TorchState(model, optimizer, batch=0, own=None)
    reducer, named = optimizer._ringlet, dict(model.named_parameters())

    def set_rate():
        optimizer.param_groups[0]["lr"] = 0.01 * hvd.size()

    def call_back():
        waits, dies = plan.get("called", (None, None))
        if started == waits:
            hvd.barrier()
        set_rate()
        if started == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if waits is not None and started != waits:
            hvd.barrier()

    if plan.get("rate"):
        set_rate()
        state.register_reset_callbacks([call_back])

    if str(started) in plan.get("die", {}):
        method, epoch, batch = plan["die"][str(started)]
        kept = getattr(Copies, method)

        def die(self, *args):
            if (int(os.environ["RINGLET_EPOCH"]), state.batch) == (epoch, batch):
                os.kill(os.getpid(), signal.SIGKILL)
            return kept(self, *args)

        setattr(Copies, method, die)

    def residuals(of_sums):
        lengths = {name: parameter.numel() for name, parameter in named.items()}
        states = {name: reducer.memory.states[name] for name in named}
        return elastic_residuals.residuals(lengths, states, of_sums)

    def owed():
        return elastic_residuals.owed(residuals(hvd.size()), hvd.size())

    def held_back():
        """Return the norm of what this rank holds back once there is one rank less."""
        return float(np.linalg.norm(residuals(hvd.size() - 1)))

    @hvd.elastic.run(resume=plan.get("resume", "commit"), redundancy=plan.get("redundancy", 0))
    def train(state):
        norm, stale = held_back(), any(p.grad is not None for p in model.parameters())
        begins = {"rank": hvd.rank(), "size": hvd.size(), "batch": state.batch, "owed": owed()}
        tell(**begins, residual=norm, stale=stale, rate=optimizer.param_groups[0]["lr"])
        if plan.get("own"):
            state.own = started
        draw = torch.Generator().manual_seed(hvd.rank())
        first = True
        while not finished(state):
            interfere(state)
            if state.batch == 25:
                tell(before=held_back())
            optimizer.zero_grad()
            model(torch.randn(8, 100, generator=draw)).square().mean().backward()
            optimizer.step()
            if first:
                tell(stepped=time.monotonic(), size=hvd.size())
            first = False
            state.batch += 1
            tear(state)
            if state.batch % 10 == 0:
                kept = {key for each in reducer.memory.states.values() for key in each}
                shards = any(key.startswith("shard.") for key in kept)
                tell(commits=state.batch, owed=owed(), size=hvd.size(), shards=shards)
                try:
                    state.commit()
                except HostsUpdatedInterrupt:
                    if plan.get("freeze") == started:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    raise
                norm = float(np.linalg.norm(residuals(hvd.size())))
                tell(committed=state.batch, residual=held_back(), norm=norm)

    train(state)
    equal = hvd.replicas_equal(model.state_dict())
elif framework == "jax":
    import jax
    import jax.numpy as jnp
    import optax

    import ringlet.jax as hvd

    hvd.init()
    tell(specs=told_specs())
    spec = plan.get("spec", "int8 | ef")
    optimizer = optax.chain(hvd.reduce_gradients(spec), optax.adam(0.01))
    params = {"first": jnp.full((100, 60), 0.1), "second": jnp.full((60, 5), -0.1)}
    more = {"key": jax.random.key(started), "seen": np.array([started << 40]), "best": None}
    state = hvd.elastic.JaxState(params, optimizer, batch=0, own=None, **more)

    def loss(params, x):
        return ((x @ params["first"] @ params["second"]) ** 2).mean()

    def step(params, opt_state, x):
        updates, opt_state = optimizer.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(step, donate_argnums=(0, 1) if plan.get("donate") else ())

    @hvd.elastic.run(resume=plan.get("resume", "commit"))
    def train(state):
        norm = state.held_back()
        tell(rank=hvd.rank(), size=hvd.size(), batch=state.batch, residual=norm)
        x = np.random.default_rng(hvd.rank()).normal(size=(8, 100)).astype("float32")
        while not finished(state):
            interfere(state)
            if state.batch == 25:
                tell(before=state.held_back())
            state.params, state.opt_state = step(state.params, state.opt_state, x)
            state.batch += 1
            if state.batch % 10 == 0:
                state.best, state.seen = jax.tree.map(jnp.copy, state.params), state.seen + 1
                state.key = jax.random.split(state.key)[0]
                state.commit()
                tell(committed=state.batch, residual=state.held_back())

    train(state)
    assert int(state.opt_state[0].step) == state.batch
    commits = [int(state.seen[0])] * hvd.size()
    assert hvd.allgather_object(int(state.seen[0])) == commits
    equal = hvd.replicas_equal([state.params, state.opt_state[1], state.best, state.key])
else:
    import keras

    import ringlet.keras as hvd

    hvd.init()
    random.seed(0)  # what initializers ask; keras.utils.set_random_seed imports TensorFlow
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(60), keras.layers.Dense(5)])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.01), compression=plan.get("spec", "int8 | ef")
    )
    model.compile(optimizer, "mse")
    state = hvd.elastic.KerasState(model, batch=0)
    x, y = np.ones((8, 100), np.float32), np.zeros((8, 5), np.float32)

    @hvd.elastic.run(resume=plan.get("resume", "commit"), redundancy=plan.get("redundancy", 0))
    def train(state):
        norm = optimizer._ringlet.memory.norm()
        tell(rank=hvd.rank(), size=hvd.size(), batch=state.batch, residual=norm)
        while not finished(state):
            interfere(state)
            if state.batch == 25:
                tell(before=optimizer._ringlet.memory.norm())
            model.train_on_batch(x * (1 + hvd.rank()), y)
            state.batch += 1
            if state.batch % 10 == 0:
                state.commit()

    train(state)
    weights = [np.asarray(w).tobytes() for w in model.get_weights()]
    equal = len(set(hvd.allgather_object(weights[0]))) == 1
tell(done=True, rank=hvd.rank(), size=hvd.size(), equal=bool(equal), batch=state.batch)
