"""Steps of JAX with reduce_gradients: what it costs on one host, and what it saves on a slow link.

    ringlet run -np 2 python benchmarks/jax_gradients.py              # overhead for 10 MB
    python benchmarks/jax_gradients.py --mbit 100       # four hosts; needs root and iproute2

The first takes a compiled step on 10 MB of gradients in 20 tensors, and times it with and without
``reduce_gradients``, with a state that is kept or donated, the engine alone on as many NumPy
arrays, and ``lax.psum`` between the processes: all in turn, round after round, so that medians are
of the same load. Then it times ``lax.psum`` between devices of one process. The second trains a
transformer of flax on random bytes on hosts that are network namespaces, with nothing that travels,
uncompressed and with ``--compression``, and prints steps a second and what was sent.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from progress import announce, follow

from ringlet.cli.progress import Progress

HOSTS = 4


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, help="rate of the links between four hosts")
    parser.add_argument("--compression", default="int4 | ef", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--psum", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def milliseconds(calls, repeats=30, barrier=lambda: None):
    """Return the median time of each call, by name: they take turns."""
    times = {name: [] for name in calls}
    for turn in range(repeats + 3):
        for name, call in calls.items():
            barrier()
            start = time.perf_counter()
            call()
            if turn >= 3:  # before: compiled, negotiated, allocated
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def gradients():
    """Return 10 MB of float32 in 20 tensors."""
    import jax

    keys = jax.random.split(jax.random.key(0), 20)
    return [jax.random.normal(key, (125, 1000)) for key in keys]


def overhead():
    """Time what reduce_gradients adds to a compiled step."""
    import jax

    import ringlet.jax as hvd
    from ringlet.compressors import Router
    from ringlet.ring.processes.torchrun import free_port
    from ringlet.shared.gradients.gradient_reducer import GradientReducer
    from ringlet.shared.gradients.gradient_settings import Settings, Slot

    hvd.init()
    if hvd.size() > 1:
        port = hvd.broadcast_object(free_port())
        jax.distributed.initialize(f"localhost:{port}", hvd.size(), hvd.rank())
    grads = gradients()
    between = psum_between_processes(grads) if hvd.size() > 1 else None
    arrays = [np.array(each) for each in grads]
    slots = [Slot(f"g{i}", "float32", array.shape) for i, array in enumerate(arrays)]
    plain = jax.jit(lambda g: [2 * x for x in g])
    first = "a step that doubles the gradients"
    for spec in ("none", "fp16", "int8 | ef", "int4 | ef", "topk(ratio=0.01) | ef"):
        transformation = hvd.reduce_gradients(spec)
        kept = transformation.init(grads)
        held = [transformation.init(grads)]

        def step(g, state, update=transformation.update):
            return update([2 * x for x in g], state)

        keeping, donating = jax.jit(step), jax.jit(step, donate_argnums=1)
        reducer = GradientReducer(f"engine {spec}", Settings(Router(spec)))

        def engine(reducer=reducer):
            reducer.reduce(slots, [2 * array for array in arrays])

        def donated(donating=donating, held=held):
            _, held[0] = jax.block_until_ready(donating(grads, held[0]))

        calls = {
            first: lambda: jax.block_until_ready(plain(grads)),
            "and reduces them, by the engine alone": engine,
            "in the program": lambda k=keeping, s=kept: jax.block_until_ready(k(grads, s)),
            "in the program, its state donated": donated,
        }
        if between is not None:
            calls["and sums them by lax.psum of processes"] = between
        found = milliseconds(calls, barrier=hvd.barrier)
        if hvd.rank() == 0:
            for name, time_taken in found.items():
                more = f"{time_taken - found[first]:+8.2f}" if name != first else ""
                print(f"{spec:22}{name:40}{time_taken:8.2f} ms {more}", flush=True)
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    if size > 1:
        jax.distributed.shutdown()
    if rank == 0:
        devices = f"--xla_force_host_platform_device_count={size}"
        env = os.environ | {"XLA_FLAGS": devices}
        subprocess.run([sys.executable, __file__, "--psum"], env=env, check=True)


def psum_between_processes(grads):
    """Return a function that doubles gradients and sums them over processes, by XLA's own gloo."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    devices = [jax.local_devices(process_index=i)[0] for i in range(jax.process_count())]
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    axis = PartitionSpec("data")
    rows = [
        jax.make_array_from_process_local_data(NamedSharding(mesh, axis), np.array(each))
        for each in grads
    ]
    summed = jax.jit(
        jax.shard_map(
            lambda g: [jax.lax.psum(2 * x, "data") for x in g],
            mesh=mesh,
            in_specs=axis,
            out_specs=PartitionSpec(),
        )
    )
    return lambda: jax.block_until_ready(summed(rows))


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
    doubled = mapped(lambda g: [2 * x for x in g])
    summed = mapped(lambda g: [jax.lax.psum(2 * x, "data") + 0 * x for x in g])
    calls = {
        "doubled": lambda: jax.block_until_ready(doubled(grads)),
        "summed": lambda: jax.block_until_ready(summed(grads)),
    }
    found = milliseconds(calls)
    name, more = f"and sums them by lax.psum, {count} devices", found["summed"] - found["doubled"]
    print(f"{name:64}{found['summed']:8.2f} ms {more:+8.2f}", flush=True)


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

    found, alone = {}, "nothing travels"
    for spec in (alone, "none", compression):
        if hvd.rank() == 0:
            announce(spec)
        adam = optax.adam(1e-3)
        optimizer = adam if spec == alone else optax.chain(hvd.reduce_gradients(spec), adam)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, tokens, optimizer=optimizer):
            grads = jax.grad(loss)(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = jax.tree.map(jax.numpy.array, start)
        params, state = jax.block_until_ready(step(params, optimizer.init(params), tokens))
        compiled = step._cache_size()
        hvd.barrier()
        begun, before = time.perf_counter(), hvd.stats().wire_bytes
        for _ in range(steps):
            params, state = jax.block_until_ready(step(params, state, tokens))
        hvd.barrier()
        sent = (hvd.stats().wire_bytes - before) / steps / 1e6
        found[spec] = steps / (time.perf_counter() - begun), sent
        assert step._cache_size() == compiled, "a step was compiled while it was timed"
        assert spec == alone or hvd.replicas_equal(params)
    if hvd.rank() == 0:
        size = sum(leaf.size for leaf in jax.tree.leaves(start))
        print(f"a transformer of {size / 1e6:.1f}M parameters on {hvd.size()} ranks", flush=True)
        for spec, (rate, sent) in found.items():
            times = rate / found["none"][0]
            print(f"{spec:30}{rate:8.3f} steps/s {times:8.2f} {sent:8.2f} MB a step", flush=True)


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
        with Progress(3) as progress:  # specs that ``train`` takes in turn
            follow(progress, f"{args.mbit:g} Mbit/s", hosts.command(0, [*run, *script]))


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
