"""Steps of JAX with reduce_gradients: what it costs on one host, and what it saves on a slow link.

    ringlet run -np 2 python benchmarks/jax_gradients.py              # overhead for 10 MB
    python benchmarks/jax_gradients.py --mbit 100       # four hosts; needs root and iproute2

The first takes a compiled step on 10 MB of gradients in 20 tensors, and times what is added: by
``reduce_gradients`` on one rank (the call alone), on all ranks, and by ``lax.psum`` between as many
devices of one process. The second trains a transformer of flax on random bytes on hosts that are
network namespaces, uncompressed and with ``--compression``, and prints steps a second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HOSTS = 4


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, help="rate of the links between four hosts")
    parser.add_argument("--compression", default="int4 | ef", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--psum", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def milliseconds(function, *given, repeats=20):
    """Return the median time of a call."""
    import jax

    jax.block_until_ready(function(*given))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*given))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def gradients():
    """Return 10 MB of float32 in 20 tensors."""
    import jax

    keys = jax.random.split(jax.random.key(0), 20)
    return [jax.random.normal(key, (125, 1000)) for key in keys]


def overhead():
    """Time what reduce_gradients adds to a compiled step."""
    import jax

    import ringlet.jax as hvd

    hvd.init()
    grads = gradients()
    plain = milliseconds(jax.jit(lambda g: [2 * x for x in g]), grads)
    rows = [("a step that doubles the gradients", plain)]
    for spec in ("none", "fp16", "int8 | ef", "int4 | ef", "topk(ratio=0.01) | ef"):
        transformation = hvd.reduce_gradients(spec)
        state = transformation.init(grads)

        def step(g, state, update=transformation.update):
            return update([2 * x for x in g], state)

        rows.append((f"and reduces them: {spec}", milliseconds(jax.jit(step), grads, state)))
    if hvd.rank() == 0:
        for name, time_taken in rows:
            print(f"{name:45}{time_taken:8.2f} ms   {time_taken - plain:+8.2f}", flush=True)
    size = hvd.size()
    hvd.shutdown()
    if int(os.environ.get("RANK", 0)) == 0:
        devices = f"--xla_force_host_platform_device_count={size}"
        env = os.environ | {"XLA_FLAGS": devices}
        subprocess.run([sys.executable, __file__, "--psum"], env=env, check=True)


def psum():
    """Time lax.psum between the devices of this process."""
    import jax
    from jax.sharding import AxisType, PartitionSpec

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,))
    axis = PartitionSpec("data")

    def mapped(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=axis, out_specs=axis))

    grads = [jax.numpy.concatenate([x] * count) for x in gradients()]
    plain = milliseconds(mapped(lambda g: [2 * x for x in g]), grads)
    summed = milliseconds(mapped(lambda g: [jax.lax.psum(2 * x, "data") + 0 * x for x in g]), grads)
    name = f"and sums them by lax.psum, {count} devices"
    print(f"{name:45}{summed:8.2f} ms   {summed - plain:+8.2f}", flush=True)


def train(compression, steps):
    """Print how many steps a second a transformer of flax takes, uncompressed and compressed."""
    import flax.linen as nn
    import jax
    import optax

    import ringlet.jax as hvd

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(512)(nn.gelu(nn.Dense(2048)(nn.LayerNorm()(x))))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(256, 512)(tokens)
            for _ in range(4):
                x = Block()(x)
            return nn.Dense(256)(nn.LayerNorm()(x))

    hvd.init()
    model = Transformer()
    tokens = jax.random.randint(jax.random.key(hvd.rank()), (1, 33), 0, 256)
    start = hvd.broadcast_pytree(model.init(jax.random.key(0), tokens[:, :-1]))

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    found = {}
    for spec in ("none", compression):
        optimizer = optax.chain(hvd.reduce_gradients(spec), optax.adam(1e-3))

        @jax.jit
        def step(params, state, tokens, optimizer=optimizer):
            grads = jax.grad(loss)(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = step(start, optimizer.init(start), tokens)
        hvd.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            params, state = jax.block_until_ready(step(params, state, tokens))
        hvd.barrier()
        found[spec] = steps / (time.perf_counter() - begun)
        assert hvd.replicas_equal(params)
    if hvd.rank() == 0:
        size = sum(leaf.size for leaf in jax.tree.leaves(start))
        print(f"a transformer of {size / 1e6:.1f}M parameters on {hvd.size()} ranks", flush=True)
        for spec, rate in found.items():
            print(f"{spec:30}{rate:8.3f} steps/s {rate / found['none']:8.2f}", flush=True)


def on_shaped_hosts(args):
    """Run this script on network namespaces with links of so many megabits a second."""
    import netns

    if why := netns.unavailable():
        sys.exit(f"--mbit {why}")
    with netns.Hosts(HOSTS, args.mbit) as hosts:
        where = ["-H", hosts.slots(1), "--rsh", hosts.rsh]
        where += ["--network-interface", netns.INTERFACE, "--transport", "gloo"]
        where += ["--env", f"GLOO_SOCKET_IFNAME={netns.INTERFACE}"]
        run = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *where, sys.executable]
        told = ["--train", "--compression", args.compression, "--steps", str(args.steps)]
        script = [str(Path(__file__).resolve()), *told]
        subprocess.run(hosts.command(0, [*run, *script]), check=True)


if __name__ == "__main__":
    arguments = parse_args()
    if arguments.psum:
        psum()
    elif arguments.train:
        train(arguments.compression, arguments.steps)
    elif arguments.mbit:
        on_shaped_hosts(arguments)
    else:
        overhead()
