"""One rank of test_gpu_tensorflow.py: eager tensors on a GPU over NCCL, all ranks on one GPU."""

import os

import numpy as np
import tensorflow as tf

gpus = tf.config.list_physical_devices("GPU")
own = gpus[int(os.environ["LOCAL_RANK"]) % len(gpus)]
tf.config.set_visible_devices(own, "GPU")
tf.config.experimental.set_memory_growth(own, True)  # or nothing is left for CuPy and NCCL

import ringlet.tensorflow as hvd  # noqa: E402
from ringlet.tensorflow.ops.placement import direct  # noqa: E402

hvd.init(transport="nccl")
rank, size = hvd.rank(), hvd.size()


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on(device, values):
    with tf.device(device):
        return tf.identity(tf.constant(values))


x = drawn(rank, 300, 400)
assert direct([on("GPU:0", x)], hvd.Sum) is not None
for spec in "none", "fp16", "int8", "topk(ratio=0.1)":
    here = hvd.allreduce(on("GPU:0", x), name=f"gpu.{spec}", compression=spec)
    there = hvd.allreduce(on("CPU:0", x), name=f"host.{spec}", compression=spec)
    assert "GPU" in here.device
    np.testing.assert_array_equal(here.numpy(), there.numpy(), spec)
for dtype in tf.float16, tf.bfloat16, tf.float64, tf.int64:
    some = tf.cast(8 * x, dtype)
    here, there = (hvd.allreduce(on(d, some), op=hvd.Sum) for d in ("GPU:0", "CPU:0"))
    np.testing.assert_array_equal(tf.cast(here, tf.float64), tf.cast(there, tf.float64), dtype.name)
word = hvd.broadcast(on("GPU:0", x), 1)
np.testing.assert_array_equal(word.numpy(), drawn(1, 300, 400))

# TensorFlow's stream is busy before the engine reads, and again after it has written.
for turn in range(20):
    with tf.device("GPU:0"):
        y = tf.constant(x)
        for _ in range(20):
            y = tf.tanh(tf.matmul(tf.matmul(y, y, transpose_b=True), y))
        total = hvd.allreduce(tf.fill(y.shape, float(turn + rank)) + 0 * y, op=hvd.Sum)
        expected = size * turn + sum(range(size))
        assert tf.reduce_all(total == float(expected)).numpy()
        del total, y
hvd.shutdown()
print(f"rank {rank} is done")
