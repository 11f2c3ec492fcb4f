"""One semantics: payloads and results have the same bits, whoever hands the gradients in.

The same gradients go, under the same names, through each framework's own way of reducing, over
several transports, fusion thresholds and numbers of streams. This file is also the script that
ranks run, and prints the matrix of hashes as a program: ``python test_one_semantics.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.preloaded("tensorflow")

SIZE, STEPS = 3, 2
SHAPES = {"a": (50, 60), "b": (7,), "c": (9000,), "d": (40, 5, 20)}
DECODED = (
    "int8 | ef", "int4 | hadamard | ef", "onebit | ef", "natural", "topk(ratio=0.05) | int8 | ef",
    "randomk(ratio=0.1)", "block_topk(ratio=0.05, bits=8) | ef",
)  # fmt: skip
# Sums on the wire: of more than two ranks in the transport's order.
SUMMED = ("none", "fp16", "powersgd(rank=2) | ef")
SPECS = (*DECODED, *SUMMED)
# A hook's tensors have its label in their names, by which random numbers are drawn.
NOT_BY_DDP = ("int4 | hadamard | ef", "natural", "randomk(ratio=0.1)", *SUMMED)
FRAMEWORKS = ("torch", "ddp", "tensorflow", "keras", "jax")
SETTINGS = {  # transport, fusion threshold in bytes, streams
    "gloo": ("gloo", 1 << 26, 4),
    "gloo, small buckets, one stream": ("gloo", 1 << 13, 1),
    "mpi": ("mpi", 1 << 15, 2),
    "local": ("local", 1 << 26, 1),
}


def gradients(rank, step):
    """Return this rank's gradients of a step, by name."""
    import numpy as np

    numbers = np.random.default_rng([rank, step])
    return {name: numbers.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}


def by_torch(spec, given):
    import torch

    import ringlet.torch as hvd

    held = {n: torch.nn.Parameter(torch.zeros(shape)) for n, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(held.values(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, list(held.items()), compression=spec)
    for step in given:
        optimizer.zero_grad()
        sum((held[n] * torch.from_numpy(g)).sum() for n, g in step.items()).backward()
        optimizer.synchronize()
        yield {n: p.grad.numpy().copy() for n, p in held.items()}
        with optimizer.skip_synchronize():
            optimizer.step()


def by_ddp(spec, given):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import ringlet.torch as hvd

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))

        def forward(self, step):
            return sum((getattr(self, n) * torch.from_numpy(g)).sum() for n, g in step.items())

    model = Model()
    named = list(model.named_parameters())
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(*hvd.ddp_hook(spec, named_parameters=named))
    for step in given:
        parallel.zero_grad()
        parallel(step).backward()
        yield {n: p.grad.numpy().copy() for n, p in named}


def by_tensorflow(spec, given):
    import tensorflow as tf

    import ringlet.tensorflow as hvd

    held = {n: tf.Variable(tf.zeros(shape), name=n) for n, shape in SHAPES.items()}

    @tf.function
    def reduced(step):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(held[n] * g) for n, g in step.items()])
        tape = hvd.DistributedGradientTape(tape, compression=spec)
        return tape.gradient(loss, held)

    for step in given:
        yield {n: g.numpy() for n, g in reduced(step).items()}


def by_keras(spec, given):
    import keras
    import numpy as np

    import ringlet.keras as hvd

    held = {n: keras.Variable(np.zeros(shape, "float32"), name=n) for n, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=spec)
    for step in given:
        for variable in held.values():
            variable.assign(np.zeros(variable.shape, "float32"))
        tensors = [keras.ops.convert_to_tensor(g) for g in step.values()]
        optimizer.apply(tensors, list(held.values()))
        yield {n: -keras.ops.convert_to_numpy(v) for n, v in held.items()}


def by_jax(spec, given):
    import jax
    import numpy as np

    import ringlet.jax as hvd
    from ringlet.ring.transports.local import this_thread

    transformation = hvd.reduce_gradients(spec)
    state = transformation.init(given[0])
    # Programs call back on threads of XLA's, which are no ranks where ranks are threads.
    update = jax.jit(transformation.update) if this_thread() is None else transformation.update
    for step in given:
        reduced, state = update(step, state)
        yield {n: np.asarray(g) for n, g in reduced.items()}


WATCHED = {}  # payloads' hashes by tensor, step and place in it


def watch_payloads():
    """Note what compressors make of gradients, before anything travels."""
    from ringlet.compressors.core.context import Context
    from ringlet.fusion.planning.member import Member

    inner = Member.call

    def call(self, function, *args):
        result = inner(self, function, *args)
        context = args[-1] if args and isinstance(args[-1], Context) else None
        name = getattr(function, "__name__", "")
        if name in ("encode_into", "compress") and context is not None and context.stage == 1:
            payload = args[1] if name == "encode_into" else result
            hashed = hashlib.blake2b(digest_size=8)
            for part in sorted(payload):
                hashed.update(payload[part].tobytes())
            known = context.name.rpartition(".")[2]  # without a hook's label
            WATCHED[context.rank, known, context.step, context.offset] = hashed.hexdigest()
        return result

    Member.call = call


def hashes(frameworks):
    """Return, on rank 0, hashes of payloads and of results by framework and spec."""
    import ringlet.torch as hvd
    from ringlet.job.objects import allgather_object

    rank, told = hvd.rank(), {}
    given = [gradients(rank, step) for step in range(STEPS)]
    for framework in frameworks:
        reduce = globals()[f"by_{framework}"]
        for spec in SPECS:
            if framework == "ddp" and spec in NOT_BY_DDP:
                continue
            hvd.barrier()
            results = hashlib.blake2b(digest_size=6)
            for reduced in reduce(spec, given):
                for name in sorted(SHAPES):
                    results.update((reduced[name] + 0.0).tobytes())  # -0.0 is 0.0, too
            mine = {key: value for key, value in list(WATCHED.items()) if key[0] == rank}
            every = allgather_object((sorted(mine.items()), results.hexdigest()))
            assert len({result for _, result in every}) == 1, (framework, spec)
            text = repr([payloads for payloads, _ in every]).encode()
            sent = hashlib.blake2b(text, digest_size=6).hexdigest() if every[0][0] else "-"
            told[f"{framework}: {spec}"] = [sent, every[0][1]]
            for key in mine:
                del WATCHED[key]
    return told


def main(transport):
    import torch

    import ringlet.torch as hvd
    from ringlet.ring.transports.local import run_local

    torch.set_num_threads(1)
    watch_payloads()
    if transport == "local":
        print(json.dumps(run_local(as_thread, SIZE)[0]), flush=True)
        return
    hvd.init()
    torch.distributed.init_process_group("gloo")
    told = hashes(FRAMEWORKS)
    if hvd.rank() == 0:
        print(json.dumps(told), flush=True)
    torch.distributed.destroy_process_group()


def as_thread(comm):
    """Return the hashes of those ways that stay in the thread that calls them."""
    import ringlet.torch as hvd

    hvd.init(comm)
    told = hashes(("torch", "keras", "jax"))
    hvd.shutdown()
    return told


def started(setting):
    """Return the hashes of a job with one of the SETTINGS."""
    transport, threshold, streams = SETTINGS[setting]
    limits = {"RINGLET_FUSION_THRESHOLD": str(threshold), "RINGLET_STREAMS": str(streams)}
    program = [sys.executable, __file__, transport]
    if transport != "local":
        run = [sys.executable, "-m", "ringlet", "run", "-np", str(SIZE), "--transport", transport]
        program = [*run, "--no-prefix", *program]
    done = subprocess.run(
        program, env=os.environ | limits, capture_output=True, text=True, timeout=250, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(lines[-1])


def table(matrix):
    """Return the matrix as text: a row for each spec and setting, a column for each framework."""
    lines = [f"{'':36}{'payloads':14}" + "".join(f"{name:14}" for name in FRAMEWORKS)]
    for spec in SPECS:
        lines.append(spec)
        for setting, told in matrix.items():
            cells = [told.get(f"{name}: {spec}", ["", ""]) for name in FRAMEWORKS]
            sent = ",".join(sorted({sent for sent, _ in cells if sent}))
            row = "".join(f"{result:14}" for _, result in cells)
            lines.append(f"  {setting:34}{sent:14}{row}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def matrix():
    """Run the jobs, and print what they told."""
    found = {setting: started(setting) for setting in SETTINGS}
    print(table(found))
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_payloads_are_the_same_everywhere(matrix, spec):
    sent = {told[key][0] for told in matrix.values() for key in told if key.endswith(f": {spec}")}
    assert len(sent) == 1, table(matrix)


@pytest.mark.parametrize("spec", DECODED)
def test_results_of_what_is_decoded_are_the_same_everywhere(matrix, spec):
    found = {told[key][1] for told in matrix.values() for key in told if key.endswith(f": {spec}")}
    assert len(found) == 1, table(matrix)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", SUMMED)
def test_sums_on_the_wire_are_the_same_in_every_framework(matrix, spec, setting):
    told = matrix[setting]
    assert len({told[key][1] for key in told if key.endswith(f": {spec}")}) == 1, table(matrix)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        print(table({setting: started(setting) for setting in SETTINGS}))
