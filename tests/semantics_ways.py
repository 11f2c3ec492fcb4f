"""Ways of handing gradients in, a generator for each framework: tests/semantics_job.py compares.

Each takes a spec and the gradients of every step, by name, and yields what they are reduced to.
Frameworks are imported where they are used: MXNet has an environment without most of the others.
"""

from __future__ import annotations

import os

from semantics_cases import SHAPES


def by_torch(spec, given):
    import torch

    import ringlet.torch as hvd

    held = {n: torch.nn.Parameter(torch.zeros(shape)) for n, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(held.values(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, list(held.items()), compression=spec)
    for step in given:
        optimizer.zero_grad()
        sum((held[n] * torch.from_numpy(g)).sum() for n, g in step.items()).backward()
        optimizer.synchronize()
        yield {n: p.grad.numpy().copy() for n, p in held.items()}
        with optimizer.skip_synchronize():
            optimizer.step()


def by_ddp(spec, given):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import ringlet.torch as hvd

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

        def forward(self, step):
            return sum((getattr(self, n) * torch.from_numpy(g)).sum() for n, g in step.items())

    model = Model()
    named = list(model.named_parameters())
    parallel = DistributedDataParallel(model, bucket_cap_mb=int(os.environ["BUCKET"]) / (1 << 20))
    parallel.register_comm_hook(*hvd.ddp_hook(spec, named_parameters=named))
    for step in given:
        parallel.zero_grad()
        parallel(step).backward()
        yield {n: p.grad.numpy().copy() for n, p in named}


def by_fsdp2(spec, given):
    """Parameters of one row, so that the first rank has them as a whole."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import ringlet.torch as hvd

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(1, *shape)))

        def forward(self, step):
            return sum((getattr(self, n) * torch.from_numpy(g)).sum() for n, g in step.items())

    model = Model()
    fully_shard(model)
    hvd.compress_fsdp(model, spec)
    for step in given:
        model.zero_grad()
        model(step).backward()
        yield {n: p.grad.full_tensor()[0].numpy() for n, p in model.named_parameters()}


def by_tensorflow(spec, given):
    import tensorflow as tf

    import ringlet.tensorflow as hvd

    held = {n: tf.Variable(tf.zeros(shape), name=n) for n, shape in SHAPES.items()}

    @tf.function
    def reduced(step):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(held[n] * g) for n, g in step.items()])
        tape = hvd.DistributedGradientTape(tape, compression=spec)
        return tape.gradient(loss, held)

    for step in given:
        yield {n: g.numpy() for n, g in reduced(step).items()}


def by_keras(spec, given):
    import keras
    import numpy as np

    import ringlet.keras as hvd

    held = {n: keras.Variable(np.zeros(shape, "float32"), name=n) for n, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=spec)
    for step in given:
        for variable in held.values():
            variable.assign(np.zeros(variable.shape, "float32"))
        tensors = [keras.ops.convert_to_tensor(g) for g in step.values()]
        optimizer.apply(tensors, list(held.values()))
        yield {n: -keras.ops.convert_to_numpy(v) for n, v in held.items()}


def by_jax(spec, given):
    import jax
    import numpy as np

    import ringlet.jax as hvd
    from ringlet.ring.transports.local import this_thread

    transformation = hvd.reduce_gradients(spec)
    state = transformation.init(given[0])
    # Programs call back on threads of XLA's, which are no ranks where ranks are threads.
    update = jax.jit(transformation.update) if this_thread() is None else transformation.update
    for step in given:
        reduced, state = update(step, state)
        yield {n: np.asarray(g) for n, g in reduced.items()}


def by_mxnet(spec, given):
    """Gluon's trainer, which reduces all gradients of a step together."""
    import ringlet.mxnet as hvd  # isort: skip - it makes MXNet importable
    import mxnet as mx

    held = {n: mx.gluon.Parameter(n, shape=shape) for n, shape in SHAPES.items()}
    for parameter in held.values():
        parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(list(held.values()), "sgd", compression=spec)
    for step in given:
        with mx.autograd.record():
            loss = sum((held[n].data() * mx.nd.array(g)).sum() for n, g in step.items())
        loss.backward()
        trainer.allreduce_grads()
        yield {n: p.grad().asnumpy() for n, p in held.items()}


def by_mxnet_module(spec, given):
    """A Module's optimizer, which reduces one gradient after the other."""
    import ringlet.mxnet as hvd  # isort: skip - it makes MXNet importable
    import mxnet as mx

    inner = mx.optimizer.SGD(learning_rate=1.0, param_idx2name=dict(enumerate(SHAPES)))
    optimizer = hvd.DistributedOptimizer(inner, compression=spec)
    for step in given:
        held = {n: mx.nd.zeros(shape) for n, shape in SHAPES.items()}
        for i, (name, weight) in enumerate(held.items()):
            state = optimizer.create_state(i, weight)
            optimizer.update(i, weight, mx.nd.array(step[name]), state)
        yield {n: -weight.asnumpy() for n, weight in held.items()}
