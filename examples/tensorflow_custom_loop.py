"""A training loop of one's own: DistributedGradientTape inside ``tf.function``.

    ringlet run -np 2 python examples/tensorflow_custom_loop.py --compression "topk(ratio=0.1)|ef"
    ringlet run -np 2 python examples/tensorflow_custom_loop.py --eager

Learns a function of 64 numbers. All gradients of a step travel through one graph node, whatever
their number. Saves and restores the model together with what compression held back.
"""

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import ringlet.tensorflow as hvd


def make_model():
    hidden = [keras.layers.Dense(128, activation="gelu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])


def batches(seed, rows=64):
    """Yield inputs and targets, other ones on every rank."""
    numbers = tf.random.Generator.from_seed(seed)
    while True:
        x = numbers.normal([rows, 64])
        yield x, tf.reduce_sum(tf.sin(x[:, :8]), 1, keepdims=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="int8 | ef", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--eager", action="store_true", help="without tf.function")
    args = parser.parse_args()
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = make_model()
    optimizer = keras.optimizers.Adam(0.002)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        tape = hvd.DistributedGradientTape(tape, compression=args.compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    train = step if args.eager else tf.function(step)
    losses = []
    for i, (x, y) in zip(range(args.steps), batches(hvd.rank()), strict=False):
        losses.append(float(hvd.allreduce(train(x, y), name="loss")))
        if hvd.rank() == 0 and i % 50 == 0:
            print(f"step {i:4d}  loss {losses[-1]:.4f}", flush=True)

    # Each rank keeps a file: what compression held back is its own.
    tape = hvd.DistributedGradientTape(tf.GradientTape(), compression=args.compression)
    residuals = hvd.CompressorState(tape, model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, residuals=residuals)
    path = checkpoint.write(f"{tempfile.mkdtemp()}/rank{hvd.rank()}")
    checkpoint.read(path)
    equal = hvd.replicas_equal(model.variables)
    if hvd.rank() == 0:
        print(f"loss                    {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"replicas bit-equal      {'yes' if equal else 'NO'}")
        print(f"ratio                   {hvd.stats().ratio:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
