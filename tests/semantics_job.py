"""One semantics: the job whose ranks hand the same gradients in by each framework, and its table.

This file is also the script that ranks run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import semantics_ways
from semantics_cases import (
    SETTINGS,
    SHAPES,
    SIZE,
    SPECS,
    STEPS,
    gradients,
    has,
    hash_of_payloads,
    hash_of_results,
)

# Those whose way stays in the thread that calls it: ranks of the transport "local" are threads.
IN_THREADS = ("torch", "keras", "jax", "mxnet", "mxnet_module")
WATCHED = {}  # payloads' arrays as bytes, by rank and what hash_of_payloads asks for


def watch_payloads(frameworks):
    """Note what compressors make of gradients, before anything travels."""
    from ringlet.compressors.core.context import Context
    from ringlet.fusion.buckets.bucket import SumBucket
    from ringlet.fusion.codecs.bucket_codec import BucketCodec
    from ringlet.fusion.planning.member import Member

    inner = Member.call

    def call(self, function, *args):
        result = inner(self, function, *args)
        context = args[-1] if args and isinstance(args[-1], Context) else None
        name = getattr(function, "__name__", "")
        if name in ("encode_into", "compress") and context is not None and context.stage == 1:
            note_of(context, args[1] if name == "encode_into" else result)
        return result

    Member.call = call
    encode = BucketCodec.encode_into

    def encoded(self, part, out):
        used = encode(self, part, out)
        if self._small is not None:  # members that share a call
            payloads = self._payloads(part, out)
            for i in self._small.indices[part]:
                note_of(self.members[i].context(part, self.parts), payloads[i])
        return used

    BucketCodec.encode_into = encoded
    encode_sums = SumBucket._encode

    def summed(self):
        used = encode_sums(self)
        if self._small is not None:
            for i in self._small.indices[0]:
                member, name, span = self._slots[i]
                note_of(member.context(0, 1), {name: self._buffer[span]})
        return used

    SumBucket._encode = summed
    if "fsdp2" in frameworks:
        watch_fsdp()


def watch_fsdp():
    """Note what FSDP2's reduce-scatter sends, which asks compressors by itself."""
    from ringlet.compressors import NoCompression
    from ringlet.torch.parallel.fsdp_scatter import CompressedReduceScatter

    reduce = CompressedReduceScatter._reduce

    def reduced(self, way, place, values, total, pieces, nbytes):
        comm, step = way.comm, self.step
        reduce(self, way, place, values, total, pieces, nbytes)
        first = pieces[0]
        sent = place.workspace.array("send", nbytes * comm.size, "uint8")
        for name, piece in zip(SHAPES, first, strict=True):
            if not isinstance(piece.compressor, NoCompression):
                note(comm.rank, name, step, 0, piece.payload(sent))

    CompressedReduceScatter._reduce = reduced


def note_of(context, payload):
    known = context.name.rpartition(".")[2]  # without a hook's label
    note(context.rank, known, context.step, context.offset, payload)


def note(rank, name, step, offset, payload):
    sent = WATCHED.setdefault(rank, {})
    for part, array in payload.items():
        sent[name, step, offset, part] = array.tobytes()


def hashes(setting, frameworks):
    """Return hashes of payloads and of results by framework and spec, the same on every rank."""
    from ringlet.horovod.common_names import rank as this_rank
    from ringlet.job.objects import allgather_object

    rank, told = this_rank(), {}
    given = [gradients(rank, step) for step in range(STEPS)]
    for framework in frameworks:
        reduce = getattr(semantics_ways, f"by_{framework}")
        for spec in SPECS:
            if not has(framework, spec, setting):
                continue
            allgather_object(None)
            results = hash_of_results(reduce(spec, given))
            every = allgather_object((WATCHED.pop(rank, {}), results))
            assert len({result for _, result in every}) == 1, (framework, spec)
            sent = hash_of_payloads([sent for sent, _ in every])
            told[f"{framework}: {spec}"] = [sent, results]
    return told


def main(setting, frameworks):
    transport = SETTINGS[setting][0]
    if "torch" in frameworks:
        import torch

        torch.set_num_threads(1)
    watch_payloads(frameworks)
    if transport == "local":
        from ringlet.ring.transports.local import run_local

        alone = [name for name in frameworks if name in IN_THREADS]
        if "keras" in alone:
            run_local(meet_types, 1)
        print(
            json.dumps(run_local(lambda comm: as_thread(comm, setting, alone), SIZE)[0]), flush=True
        )
        return
    from ringlet.horovod import common_names as job

    job.init()
    grouped = bool({"ddp", "fsdp2"}.intersection(frameworks))
    if grouped:
        torch.distributed.init_process_group("gloo")
    told = hashes(setting, frameworks)
    if job.rank() == 0:
        print(json.dumps(told), flush=True)
    if grouped:
        torch.distributed.destroy_process_group()


def as_thread(comm, setting, frameworks):
    """Return the hashes of a rank that is a thread."""
    from ringlet.horovod import common_names as job

    job.init(comm)
    told = hashes(setting, frameworks)
    job.shutdown()
    return told


def meet_types(comm):
    """Let TensorFlow see in one thread what types its operations are given.

    While it looks at one that it does not know, its dispatcher keeps arguments where the other
    threads' calls put theirs, and a process whose ranks are threads sometimes ended there.
    """
    from ringlet.horovod import common_names as job

    job.init(comm)
    for _ in semantics_ways.by_keras("none", [gradients(0, step) for step in range(STEPS)]):
        pass
    job.shutdown()


def started(setting, frameworks):
    """Return the hashes of a job with one of the SETTINGS."""
    transport, threshold, streams, bucket = SETTINGS[setting]
    limits = {"RINGLET_FUSION_THRESHOLD": str(threshold), "RINGLET_STREAMS": str(streams)}
    limits["BUCKET"] = str(bucket)
    program = [sys.executable, __file__, setting, *frameworks]
    if transport != "local":
        run = [sys.executable, "-m", "ringlet", "run", "-np", str(SIZE), "--transport", transport]
        program = [*run, "--no-prefix", *program]
    done = subprocess.run(
        program, env=os.environ | limits, capture_output=True, text=True, timeout=250, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    return json.loads(lines[-1])


class Matrix(dict):
    """The hashes by setting; the job of a setting runs when somebody asks for it."""

    def __init__(self, frameworks):
        self.frameworks = frameworks

    def __missing__(self, setting):
        self[setting] = started(setting, self.frameworks)
        return self[setting]

    def whole(self):
        """Return the matrix once all jobs have run."""
        for setting in SETTINGS:
            self[setting]
        return self


def table(matrix):
    """Return a Matrix as text: a row for each spec and setting, a column for each framework."""
    frameworks = matrix.frameworks
    lines = [f"{'':36}{'payloads':14}" + "".join(f"{name:14}" for name in frameworks)]
    for spec in SPECS:
        lines.append(spec)
        for setting, told in matrix.items():
            cells = [told.get(f"{name}: {spec}", ["", ""]) for name in frameworks]
            sent = ",".join(sorted({sent for sent, _ in cells if sent}))
            row = "".join(f"{result:14}" for _, result in cells)
            lines.append(f"  {setting:34}{sent:14}{row}")
    return "\n".join(lines)


def cells(told, spec, frameworks):
    """Return pairs of hashes, of payloads and of results, that a job has told of a spec."""
    keys = [f"{name}: {spec}" for name in frameworks]
    return [told[key] for key in keys if key in told]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
