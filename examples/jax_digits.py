"""Train a small CNN of flax on scikit-learn's digits, data-parallel, with compressed gradients.

    ringlet run -np 2 python examples/jax_digits.py --compression "topk(ratio=0.05) | ef"
    ringlet run -np 2 python examples/jax_digits.py --resume checkpoints

Every rank trains on its own part of the images, in one compiled program a step, and saves what its
compressors remember beside rank 0's model. At the end rank 0 prints the accuracy on held-out
images, and whether all replicas hold the same bits.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import StandardCheckpointer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import ringlet.jax as hvd


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="topk(ratio=0.05) | ef", metavar="SPEC")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", type=Path, default=Path("checkpoints"), metavar="FOLDER")
    parser.add_argument("--resume", type=Path, metavar="FOLDER")
    return parser.parse_args()


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def load_data():
    """Return training and held-out (images, labels), the same on every rank."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    split = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    train_x, test_x, train_y, test_y = split
    return (train_x, train_y), (test_x, test_y)


def checkpoint_of_this_rank(folder):
    """Return where a rank keeps its state: what compressors remember is each rank's own."""
    return folder.absolute() / f"rank{hvd.rank()}of{hvd.size()}"


def main():
    args = parse_args()
    hvd.init()
    (images, labels), held_out = load_data()
    images, labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]

    model = Net()
    optimizer = optax.chain(hvd.reduce_gradients(args.compression), optax.adam(args.lr))
    params = hvd.broadcast_pytree(model.init(jax.random.key(hvd.rank()), images[:1]))
    state = optimizer.init(params)  # collective: it finds out what the compressor remembers
    if args.resume:
        with StandardCheckpointer() as checkpointer:
            folder = checkpoint_of_this_rank(args.resume)
            params, state = checkpointer.restore(folder, (params, state))

    def loss(params, x, y):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(value)

    batches = 1300 // hvd.size() // args.batch_size  # as many on every rank
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        for i in range(batches):
            chosen = order[i * args.batch_size :][: args.batch_size]
            params, state, mean = step(params, state, images[chosen], labels[chosen])
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(mean):.4f}", flush=True)

    with StandardCheckpointer() as checkpointer:
        checkpointer.save(checkpoint_of_this_rank(args.save), (params, state), force=True)
    found = jnp.argmax(jax.jit(model.apply)(params, held_out[0]), axis=1)
    equal = hvd.replicas_equal(params)
    if hvd.rank() == 0:
        sent = hvd.stats().wire_bytes / 1e6
        print(f"accuracy {100 * float((found == held_out[1]).mean()):.2f} %")
        print(f"replicas bit-equal: {'yes' if equal else 'no'}; {sent:.1f} MB sent a rank")


if __name__ == "__main__":
    main()
