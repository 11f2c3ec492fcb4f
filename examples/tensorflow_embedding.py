"""A model with a large embedding: its gradients travel as rows, never as the whole table.

    ringlet run -np 2 python examples/tensorflow_embedding.py

Matrix factorisation of made-up ratings: users and items each have a table of 50,000 rows, of which
a batch touches a few hundred. Prints how large these rows are at most, beside the tables.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import ringlet.tensorflow as hvd

ROWS, WIDTH = 50_000, 16


class Factors(keras.Model):
    def __init__(self):
        super().__init__()
        self.users = keras.layers.Embedding(ROWS, WIDTH, name="users")
        self.items = keras.layers.Embedding(ROWS, WIDTH, name="items")
        self.bias = keras.layers.Dense(1, name="bias")

    def call(self, pairs):
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return tf.reduce_sum(user * item, 1, keepdims=True) + self.bias(user + item)


def ratings(count, seed):
    """Return pairs of user and item, and how well they go together."""
    numbers = np.random.default_rng(seed)
    pairs = numbers.zipf(1.3, (count, 2)) % ROWS
    return pairs, np.cos(pairs[:, :1] * 0.7) * np.cos(pairs[:, 1:] * 0.3).astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="int8 | ef", metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    pairs, stars = ratings(4096, hvd.rank())
    model = Factors()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adagrad(0.3), compression=args.compression
    )
    model.compile(optimizer, "mse")
    model(pairs[:1])
    hvd.broadcast_variables(model.variables, root_rank=0)
    batch = 256
    history = model.fit(pairs, stars, batch, args.epochs, verbose=0).history["loss"]
    steps = args.epochs * len(pairs) // batch
    largest = max(len(np.unique(pairs[i : i + batch])) for i in range(0, len(pairs), batch))
    equal = hvd.replicas_equal(model.variables)
    if hvd.rank() == 0:
        print(f"loss                    {history[0]:.3f} -> {history[-1]:.3f} in {steps} steps")
        print(f"replicas bit-equal      {'yes' if equal else 'NO'}")
        print(f"the tables              {2 * ROWS * WIDTH * 4 / 1e6:.1f} MB")
        print(f"rows of a batch         at most {2 * largest * WIDTH * 4 / 1e6:.3f} MB")
    hvd.shutdown()


if __name__ == "__main__":
    main()
