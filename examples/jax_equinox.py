"""Train a classifier of equinox on scikit-learn's digits, data-parallel, with compressed gradients.

    ringlet run -np 2 python examples/jax_equinox.py --compression "int8 | ef"
    ringlet run -np 3 --min-np 2 python examples/jax_equinox.py      # goes on when a rank is lost

A model of equinox is a pytree of its own; what is trained of it are its arrays. At the end rank 0
prints the accuracy on held-out images, and whether all replicas hold the same bits.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import ringlet.jax as hvd


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="int8 | ef", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def load_data():
    """Return training and held-out (images, labels), the same on every rank."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    split = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    train_x, test_x, train_y, test_y = split
    return (train_x, train_y), (test_x, test_y)


def main():
    args = parse_args()
    hvd.init()
    (images, labels), (unseen, truth) = load_data()
    model = eqx.nn.MLP(64, 10, 128, 2, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.chain(hvd.reduce_gradients(args.compression), optax.adam(args.lr))
    state = hvd.elastic.JaxState(params, optimizer, step=0)

    def loss(params, x, y):
        logits = jax.vmap(eqx.combine(params, rest))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, hvd.allreduce(value)

    @hvd.elastic.run
    def train(state):
        own = np.random.default_rng([state.step, hvd.rank()])  # every rank draws its own images
        while state.step < args.steps:
            chosen = own.choice(len(images), args.batch_size, replace=False)
            state.params, state.opt_state, mean = step(
                state.params, state.opt_state, images[chosen], labels[chosen]
            )
            state.step += 1
            if state.step % 50 == 0:
                state.commit()
                if hvd.rank() == 0:
                    print(f"step {state.step}: loss {float(mean):.4f}", flush=True)

    train(state)
    found = jnp.argmax(jax.vmap(eqx.combine(state.params, rest))(unseen), axis=1)
    equal = hvd.replicas_equal(state.params)
    if hvd.rank() == 0:
        print(f"accuracy {100 * float((found == truth).mean()):.2f} %")
        print(f"replicas bit-equal: {'yes' if equal else 'no'}")


if __name__ == "__main__":
    main()
