"""Collectives inside ``tf.function``: eager code, a traced one, gradients through them.

    ringlet run -np 2 python examples/tensorflow_function.py

Computes the principal component of data that is spread over the ranks, by power iteration: nobody
sees the other ranks' rows, each step sums one vector over all ranks inside a traced loop.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import ringlet.tensorflow as hvd


@tf.function
def principal_component(rows, steps):
    """Return the direction of largest variance over all ranks' rows, and that variance."""
    count = hvd.allreduce(tf.cast(tf.shape(rows)[0], tf.float32), op=hvd.Sum)
    mean = hvd.allreduce(tf.reduce_sum(rows, 0), op=hvd.Sum) / count
    centred = rows - mean
    vector = tf.ones([rows.shape[1]]) / tf.sqrt(float(rows.shape[1]))
    for _ in tf.range(steps):
        product = tf.linalg.matvec(centred, tf.linalg.matvec(centred, vector), transpose_a=True)
        vector = tf.linalg.l2_normalize(hvd.allreduce(product, op=hvd.Sum))
    spread = tf.reduce_sum(tf.square(tf.linalg.matvec(centred, vector)))
    return vector, hvd.allreduce(spread, op=hvd.Sum) / count


def main():
    hvd.init()
    numbers = np.random.default_rng(hvd.rank())
    scale = np.linspace(1, 4, 12)
    rows = (numbers.normal(size=(200 + 50 * hvd.rank(), 12)) * scale).astype(np.float32)
    vector, variance = principal_component(tf.constant(rows), tf.constant(40))

    whole = hvd.allgather(rows).numpy()  # for comparison only
    values, vectors = np.linalg.eigh(np.cov(whole.T, bias=True))
    error = 1 - abs(vectors[:, -1] @ vector.numpy())
    x = tf.Variable(1.0 + hvd.rank())
    with tf.GradientTape() as tape:
        loss = hvd.allreduce(x * x, op=hvd.Sum)  # gradients are summed over the ranks
    slope = tape.gradient(loss, x)
    if hvd.rank() == 0:
        print(f"rows on {hvd.size()} ranks         {len(whole)}")
        print(f"variance                {float(variance):.4f}, by NumPy {values[-1]:.4f}")
        print(f"angle error             {error:.1e}")
        print(f"gradient of x * x at 1  {float(slope):.1f}, of {hvd.size()} ranks")
    assert error < 1e-3
    hvd.shutdown()


if __name__ == "__main__":
    main()
