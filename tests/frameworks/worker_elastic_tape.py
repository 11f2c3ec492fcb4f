"""Trains by a DistributedGradientTape in an elastic job, and tells how far it came."""

import json

import tensorflow as tf

import ringlet.tensorflow as hvd

hvd.init()
weights = tf.Variable(0.0, name="weights")
state = hvd.elastic.TensorFlowState([weights], batch=0)


@hvd.elastic.run
def train(state):
    while state.batch < 3:
        with tf.GradientTape() as tape:
            loss = -weights
        tape = hvd.DistributedGradientTape(tape)
        weights.assign_sub(tape.gradient(loss, [weights])[0])
        state.batch += 1
        state.commit()


train(state)
print(json.dumps({"done": float(weights)}))
