"""Training steps in TensorFlow: Ringlet beside MultiWorkerMirroredStrategy, and eager batching.

    ringlet run -np 2 python benchmarks/training_tf.py
    python benchmarks/training_tf.py --mbit 1000        # two hosts; needs root and iproute2

A perceptron (by default 12.6M parameters) takes the same steps by both, interleaved in one run:
medians of the slower rank, and what share of a step is not computation. Then 161 gradients, in
eager mode, by one grouped_allreduce beside one allreduce each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from progress import announce, follow

import ringlet.tensorflow as hvd
from ringlet.cli.progress import Progress

RIG = "10.77.0."  # addresses of the hosts of benchmarks/netns.py
WARM_UP = 2  # rounds


def mirrored_strategy(address):
    """Return TensorFlow's own strategy over the ranks; to be called before any operation."""
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    workers = hvd.allgather_object(f"{address}:{port}", name="workers")
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def on_shaped_hosts(mbit, rounds):
    """Run this script on two network namespaces with links of ``mbit`` megabits a second."""
    import netns

    if why := netns.unavailable():
        sys.exit(f"--mbit {why}")
    arguments = [a for a in sys.argv[1:] if a not in ("--mbit", str(mbit), f"{mbit:g}")]
    with netns.Hosts(2, mbit) as hosts:
        where = ["-H", hosts.slots(1), "--rsh", hosts.rsh]
        where += ["--network-interface", netns.INTERFACE, "--transport", "gloo"]
        where += ["--env", f"GLOO_SOCKET_IFNAME={netns.INTERFACE}"]
        run = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *where]
        script = [sys.executable, str(Path(__file__).resolve()), "--shaped", *arguments]
        with Progress(2 * (rounds + WARM_UP)) as progress:
            follow(progress, f"{mbit:g} Mbit/s", hosts.command(0, [*run, *script]))


def make_variables(width: int, depth: int):
    shapes = [(width, width), (width,)] * depth
    return [
        tf.Variable(tf.random.stateless_normal(shape, [i, 1]) * (1 / width) ** 0.5, name=f"w{i}")
        for i, shape in enumerate(shapes)
    ]


def gradients_of(variables, x, wrap=lambda tape: tape):
    with tf.GradientTape() as tape:
        y = x
        for kernel, bias in zip(variables[::2], variables[1::2], strict=True):
            y = tf.nn.relu(tf.matmul(y, kernel) + bias)
        loss = tf.reduce_mean(tf.square(y))
    return wrap(tape).gradient(loss, variables)


def descend(variables, gradients):
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.01 * gradient)


def ways_to_step(strategy, specs, width, depth):
    """Return functions of a batch that take one step each, by name."""

    def with_mirrored(variables):
        @tf.function(autograph=False)
        def step(x):
            def replica(x):
                gradients = gradients_of(variables, x)
                context = tf.distribute.get_replica_context()
                descend(variables, context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients))

            strategy.run(replica, (x,))

        return step

    def with_ringlet(variables, spec):
        @tf.function(autograph=False)
        def step(x):
            def wrap(tape):
                return hvd.DistributedGradientTape(tape, compression=spec)

            descend(variables, gradients_of(variables, x, wrap))

        return step

    def alone(variables):
        return tf.function(
            lambda x: descend(variables, gradients_of(variables, x)), autograph=False
        )

    ways = {"computation alone": alone(make_variables(width, depth))}
    if strategy is not None:
        ways["MultiWorkerMirroredStrategy"] = with_mirrored(make_variables(width, depth))
    for spec in specs:
        ways[f"ringlet, {spec}"] = with_ringlet(make_variables(width, depth), spec)
    return ways


def measure(ways, rounds, tell):
    """Return seconds by name: medians over rounds of the slower rank's time."""
    times = {name: [] for name in ways}
    for turn in range(rounds + WARM_UP):
        tell(f"{len(ways)} ways, round {turn + 1} of {rounds + WARM_UP}")
        for name, way in ways.items():
            hvd.barrier()
            start = time.perf_counter()
            way()
            own = time.perf_counter() - start
            slowest = hvd.allreduce(np.float64(own), op=hvd.Max, name="slowest")
            times[name].append(float(slowest))
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in times.items()}


def eager_ways(count, elements):
    tensors = [tf.ones([elements]) for _ in range(count)]
    names = [f"eager.{i}" for i in range(count)]
    return {
        "grouped_allreduce": lambda: hvd.grouped_allreduce(tensors, name="eager"),
        "one allreduce each": lambda: [
            hvd.allreduce(t, name=n) for t, n in zip(tensors, names, strict=True)
        ],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1773)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--spec", action="append", help="default: none, int4 and topk(0.01) | ef")
    parser.add_argument("--mbit", type=float, help="run on two hosts with links of this rate")
    parser.add_argument("--shaped", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without-strategy", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.mbit:
        on_shaped_hosts(args.mbit, args.rounds)
        return
    hvd.init()
    address = f"{RIG}{hvd.rank() + 1}" if args.shaped else "127.0.0.1"
    strategy = None if args.without_strategy else mirrored_strategy(address)
    specs = args.spec or ["none", "int8 | ef", "int4 | ef", "topk(ratio=0.01) | ef"]
    x = tf.random.stateless_normal([args.batch_size, args.width], [hvd.rank(), 0])
    ways = ways_to_step(strategy, specs, args.width, args.depth)
    tell = announce if args.shaped and hvd.rank() == 0 else lambda what: None
    steps = measure({n: (lambda w=w: w(x)) for n, w in ways.items()}, args.rounds, tell)
    eager = measure(eager_ways(161, 256), args.rounds, tell)
    if hvd.rank() == 0:
        parameters = args.depth * (args.width**2 + args.width)
        print(f"{parameters / 1e6:.1f}M parameters, {hvd.size()} ranks")
        alone = steps["computation alone"]
        base = steps.get("MultiWorkerMirroredStrategy")
        for name, seconds in steps.items():
            share = f", {100 * (1 - alone / seconds):.0f} % communication" if name in steps else ""
            beside = f", {base / seconds:.2f} times as fast" if base else ""
            print(f"{name:32s} {seconds * 1e3:8.1f} ms{share}{beside}")
        one, group = eager["one allreduce each"], eager["grouped_allreduce"]
        print(
            f"161 eager tensors of 1 KB        {group * 1e3:8.2f} ms grouped, {one * 1e3:.2f} ms "
            f"one at a time: {one / group:.1f} times"
        )
        if args.json:
            args.json.write_text(json.dumps({"steps": steps, "eager": eager}))
    hvd.barrier()
    hvd.shutdown()
    os._exit(0)  # the strategy's health checks outlive it, and complain of peers that have left


if __name__ == "__main__":
    main()
