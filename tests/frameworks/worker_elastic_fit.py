"""Trains by ``fit``, with the elastic callbacks, and tells what is done and owed together.

    worker_elastic_fit.py PLAN

PLAN is a JSON object: ``do``: by the rank that a process had at its start, [epoch, batch] before
which it kills itself; ``set``: the ranks that reduce, by default all. All ranks have the same
gradient in each batch, so that what is done and what is owed are together as many of it as there
were batches.
"""

import json
import os
import signal
import sys

import keras
import numpy as np

import ringlet.keras as hvd

plan, started = json.loads(sys.argv[1]), int(os.environ["HOROVOD_RANK"])
GRADIENT = np.linspace(1, 2, 2048).astype("float32")

hvd.init()
plain = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((len(GRADIENT),)), plain])
few = hvd.ProcessSet(plan["set"]) if "set" in plan else hvd.global_process_set
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(1.0), compression="topk(0.01) | ef", process_set=few
)
model.compile(optimizer, loss=lambda _, given: keras.ops.mean(given))
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
if "set" in plan:
    hvd.add_process_set(few)
    state.register_reset_callbacks([lambda: hvd.add_process_set(few)])


class Ends(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if plan["do"].get(str(started)) == [state.epoch, batch]:
            os.kill(os.getpid(), signal.SIGKILL)


def together():
    """Return how many gradients are done and owed together, of the least and of the most entry."""
    states = optimizer._ringlet.memory.states.values()
    owed = sum((each["residual"] for each in states if "residual" in each), np.float32(0))
    shares = (owed - model.get_weights()[0][:, 0]) / GRADIENT
    return float(shares.min()), float(shares.max())


def tell(**what):
    what |= {"started": started, "steps": int(optimizer.iterations), "together": together()}
    what["counted"] = optimizer._ringlet.step
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


@hvd.elastic.run(resume="step")
def train(state):
    tell(size=hvd.size(), begins=[state.epoch, state.batch])
    callbacks = [
        Ends(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, 4),
    ]
    x, y = np.repeat(GRADIENT[None], 10, 0), np.zeros((10, 1))
    model.fit(
        x, y, batch_size=1, initial_epoch=state.epoch, epochs=2, verbose=0, callbacks=callbacks
    )


train(state)
tell(ends=state.epoch)
