"""In the calls of Horovod's tensorflow2_synthetic_benchmark.py, with a smaller model."""

import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import applications

hvd.init()
model = applications.MobileNet(weights=None, input_shape=(32, 32, 3), alpha=0.25, classes=1000)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([2, 32, 32, 3])
target = tf.random.uniform([2, 1], minval=0, maxval=999, dtype=tf.int64)
compression = hvd.Compression.none
losses = []


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.losses.SparseCategoricalCrossentropy()(target, probs)
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss


with tf.device("CPU"):
    losses.append(float(benchmark_step(first_batch=True)))
    seconds = timeit.timeit(
        lambda: losses.append(float(benchmark_step(first_batch=False))), number=2
    )
if hvd.rank() == 0:
    print(f"Img/sec per device: {np.mean([2 * 2 / seconds]):.1f}")
variables = model.trainable_variables
