"""One semantics: payloads and results have the same bits, whoever hands the gradients in.

The same gradients go, under the same names, through each framework's own way of reducing, over
several transports, fusion thresholds, bucket sizes and numbers of streams. This file is also the
script that ranks run, and prints the matrix of hashes as a program.
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
# FSDP2 reduces to the rank that has a parameter: what travels is of fixed size and decoded, without
# a second stage. Its names are those of parts of modules.
BY_FSDP = ("int8 | ef", "onebit | ef", "block_topk(ratio=0.05, bits=8) | ef")
FRAMEWORKS = ("torch", "ddp", "fsdp2", "tensorflow", "keras", "jax")
SETTINGS = {  # transport, fusion threshold in bytes, streams, torch's buckets in bytes
    "gloo": ("gloo", 1 << 26, 4, 1 << 24),
    "gloo, small buckets, one stream": ("gloo", 1 << 13, 1, 1 << 12),
    "gloo, one tensor a bucket": ("gloo", 1, 3, 1),
    "mpi": ("mpi", 1 << 15, 2, 1 << 15),
    "local": ("local", 1 << 26, 1, 1 << 24),
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
    parallel = DistributedDataParallel(model, bucket_cap_mb=int(os.environ["BUCKET"]) / (1 << 20))
    parallel.register_comm_hook(*hvd.ddp_hook(spec, named_parameters=named))
    for step in given:
        parallel.zero_grad()
        parallel(step).backward()
        yield {n: p.grad.numpy().copy() for n, p in named}


def by_fsdp2(spec, given):
    """Parameters of one row, so that the first rank has them as a whole."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import ringlet.torch as hvd

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(1, *shape)))

        def forward(self, step):
            return sum((getattr(self, n) * torch.from_numpy(g)).sum() for n, g in step.items())

    model = Model()
    fully_shard(model)
    hvd.compress_fsdp(model, spec)
    for step in given:
        model.zero_grad()
        model(step).backward()
        yield {n: p.grad.full_tensor()[0].numpy() for n, p in model.named_parameters()}


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


WATCHED = {}  # payloads' arrays as bytes, by rank, tensor, step and place in the tensor


def watch_payloads():
    """Note what compressors make of gradients, before anything travels."""
    from ringlet.compressors import NoCompression
    from ringlet.compressors.core.context import Context
    from ringlet.fusion.buckets.bucket import SumBucket
    from ringlet.fusion.codecs.bucket_codec import BucketCodec
    from ringlet.fusion.planning.member import Member
    from ringlet.torch.parallel.fsdp_scatter import CompressedReduceScatter

    inner = Member.call

    def call(self, function, *args):
        result = inner(self, function, *args)
        context = args[-1] if args and isinstance(args[-1], Context) else None
        name = getattr(function, "__name__", "")
        if name in ("encode_into", "compress") and context is not None and context.stage == 1:
            payload = args[1] if name == "encode_into" else result
            note_in(context, payload)
        return result

    Member.call = call
    encode = BucketCodec.encode_into

    def encoded(self, part, out):
        used = encode(self, part, out)
        if self._small is not None:  # members that share a call
            payloads = self._payloads(part, out)
            for i in self._small.places[part]:
                note_in(self.members[i].context(part, self.parts), payloads[i])
        return used

    BucketCodec.encode_into = encoded
    encode_sums = SumBucket._encode

    def summed(self):
        used = encode_sums(self)
        if self._small is not None:
            for i in self._small.places[0]:
                member, name, place = self._places[i]
                note_in(member.context(0, 1), {name: self._buffer[place]})
        return used

    SumBucket._encode = summed
    reduce = CompressedReduceScatter._reduce

    def reduced(self, comm, place, values, total, pieces):
        step = self.step
        reduce(self, comm, place, values, total, pieces)
        sent = place.workspace.array("send", pieces[-1].end * comm.size, "uint8")
        for name, piece in zip(SHAPES, pieces, strict=True):
            plain = isinstance(piece.compressor, NoCompression)
            if not plain:
                note(comm.rank, name, step, 0, piece.payload(sent))

    CompressedReduceScatter._reduce = reduced


def note_in(context, payload):
    known = context.name.rpartition(".")[2]  # without a hook's label
    note(context.rank, known, context.step, context.offset, payload)


def note(rank, name, step, offset, payload):
    arrays = {part: array.tobytes() for part, array in payload.items()}
    WATCHED[rank, name, step, offset] = arrays


def sent_by(rank):
    """Return hashes of the payloads of a rank, whole tensors', by name and step; forget them."""
    whole = {}
    for key in sorted(key for key in list(WATCHED) if key[0] == rank):
        for part, data in WATCHED.pop(key).items():
            whole.setdefault(key[1:3], {}).setdefault(part, []).append(data)
    return {
        key: hashlib.blake2b(repr(sorted(parts.items())).encode(), digest_size=8).hexdigest()
        for key, parts in (
            (key, {part: b"".join(pieces) for part, pieces in parts.items()})
            for key, parts in sorted(whole.items())
        )
    }


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
            if framework == "fsdp2" and spec not in BY_FSDP:
                continue
            hvd.barrier()
            results = hashlib.blake2b(digest_size=6)
            for reduced in reduce(spec, given):
                for name in sorted(SHAPES):
                    results.update((reduced[name] + 0.0).tobytes())  # -0.0 is 0.0, too
            every = allgather_object((sorted(sent_by(rank).items()), results.hexdigest()))
            assert len({result for _, result in every}) == 1, (framework, spec)
            text = repr([payloads for payloads, _ in every]).encode()
            sent = hashlib.blake2b(text, digest_size=6).hexdigest() if every[0][0] else "-"
            told[f"{framework}: {spec}"] = [sent, every[0][1]]
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
    transport, threshold, streams, bucket = SETTINGS[setting]
    limits = {"RINGLET_FUSION_THRESHOLD": str(threshold), "RINGLET_STREAMS": str(streams)}
    limits["BUCKET"] = str(bucket)
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
    two_stages = [name for name in FRAMEWORKS if name != "fsdp2"]
    keys = [f"{name}: {spec}" for name in two_stages]
    found = {told[key][1] for told in matrix.values() for key in keys if key in told}
    assert len(found) == 1, table(matrix)


@pytest.mark.parametrize("spec", BY_FSDP)
def test_fsdp2_has_the_mean_of_what_payloads_stand_for(matrix, spec):
    """Not of a second stage's, which the engine's scatter-reduce has. FSDP divides by itself."""
    import numpy as np

    from ringlet.compressors import parse
    from ringlet.compressors.testing.tools.simulate import context, decode, encode
    from ringlet.fusion.planning.strategy import effective

    states, hashed = {}, hashlib.blake2b(digest_size=6)
    for step in range(STEPS):
        every = [gradients(rank, step) for rank in range(SIZE)]
        for name in sorted(SHAPES):
            flat = [each[name].reshape(-1) for each in every]
            held = states.setdefault(name, [{} for _ in range(SIZE)])
            used = effective(parse(spec), "float32", flat[0].size)
            contexts = [context(x, held[rank], step=step) for rank, x in enumerate(flat)]
            sent = [encode(used, x, ctx) for x, ctx in zip(flat, contexts, strict=True)]
            total = decode(used, sent[0], flat[0].size, contexts[0])
            for payload in sent[1:]:
                used.accumulate(payload, total, contexts[0])
            hashed.update(total / np.float32(SIZE) + 0.0)
    found = {told[key][1] for told in matrix.values() for key in told if key == f"fsdp2: {spec}"}
    assert found == {hashed.hexdigest()}, table(matrix)


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
