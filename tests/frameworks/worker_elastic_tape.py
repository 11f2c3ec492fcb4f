"""Trains by a DistributedGradientTape, and tells what is owed and done where ranks are lost.

    worker_elastic_tape.py PLAN

PLAN is a JSON object: how many ``batches``; ``do``: by the rank that a process had at its start,
the batch at which it kills itself; ``state``: "variables" (TensorFlowState, eager), "session" (the
same of a ``tf.compat.v1`` optimizer) or "model" (TensorFlowKerasState, in a graph); ``resume``. All
ranks have the same gradient in each step, so that what is done and what is owed are together as
many of it as there were batches.
"""

import json
import os
import signal
import sys

import numpy as np
import tensorflow as tf

import ringlet.tensorflow as hvd

plan = json.loads(sys.argv[1])
kind, started = plan["state"], int(os.environ["HOROVOD_RANK"])
SPEC, GRADIENT = "topk(ratio=0.01) | ef", np.linspace(1, 2, 2048).astype("float32")[:, None]
v1 = tf.compat.v1


def tell(**what):
    sys.stdout.write(json.dumps({"started": started, **what}) + "\n")
    sys.stdout.flush()


hvd.init()
if kind == "session":
    v1.disable_eager_execution()
    session = v1.Session()
    weights = v1.get_variable("weights", initializer=np.zeros_like(GRADIENT))
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), compression=SPEC)
    minimise = optimizer.minimize(tf.reduce_sum(weights * GRADIENT))
    session.run(v1.global_variables_initializer())
    state = hvd.elastic.TensorFlowState(session=session, batch=0)
elif kind == "model":
    import keras

    plain = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((len(GRADIENT),)), plain])
    (weights,) = model.trainable_variables
    state = hvd.elastic.TensorFlowKerasState(model, keras.optimizers.SGD(1.0), batch=0)
else:
    weights = tf.Variable(np.zeros_like(GRADIENT), name="weights")
    state = hvd.elastic.TensorFlowState([weights], batch=0)


def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.convert_to_tensor(weights) * GRADIENT)
    tape = hvd.DistributedGradientTape(tape, compression=SPEC)
    weights.assign_sub(tape.gradient(loss, [weights])[0])


if kind == "session":

    def step():
        session.run(minimise)

elif kind == "model":
    step = tf.function(step)


def done():
    return -(session.run(weights) if kind == "session" else weights.numpy())


def reducers():
    return state._loop_reducers() if kind == "model" else state._reducers()


def together():
    """Return how many gradients are done and owed together, of the least and of the most entry."""
    residuals = [
        found["residual"]
        for reducer in reducers()
        for found in reducer.memory.states.values()
        if "residual" in found
    ]
    shares = (done().reshape(-1) + sum(residuals, np.float32(0))) / GRADIENT.reshape(-1)
    return float(shares.min()), float(shares.max())


@hvd.elastic.run(resume=plan.get("resume", "commit"))
def train(state):
    tell(begins=state.batch, size=hvd.size(), together=together(), owed=state.held_back())
    while state.batch < plan["batches"]:
        if plan["do"].get(str(started)) == state.batch:
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.batch += 1
        if state.batch % 10 == 0:
            state.commit()


train(state)
tell(ends=state.batch, together=together(), done=float((done() / GRADIENT).min()))
