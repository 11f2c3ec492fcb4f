"""Small members of a bucket share calls: their results are those that each has alone."""

import numpy as np
import pytest
from counted_calls import calls_of

from ringlet.compressors import parse
from ringlet.fusion import CompressionFailed, Engine, Limits, Request
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.codecs.small_members import MOST
from ringlet.fusion.devices.host import Place
from ringlet.fusion.planning.member import Member
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

LENGTHS = [1030, 3, 700, 2049, MOST + 5, 512]
PARTS = 3


def members(rank, dtype="float32", spec="int8 | ef | min_size(0)"):
    found = []
    for i, n in enumerate(LENGTHS):
        request = Request(f"w{i}", shape=(n,), spec=spec, dtype=dtype)
        member = Member(request, parse(spec), rank, PARTS, 0, Place())
        x = np.random.default_rng(100 * rank + i).standard_normal(n).astype(dtype)
        member.take(x, x)
        found.append(member)
    return found


def reduced(groups, parts):
    """Return what codecs of ``groups`` of members, by rank, make of them: payloads, and results."""
    codecs = [BucketCodec(group, parts) for group in groups]
    sent, sums = [], []
    for codec in codecs:
        codec.prepare()
        sent.append([np.zeros(codec.capacity(part), np.uint8) for part in range(parts)])
        for part, buffer in enumerate(sent[-1]):
            codec.encode_into(part, buffer)
    for part in range(parts):
        received = [buffers[part] for buffers in sent]
        if parts == 1:
            for codec in codecs:
                codec.decode_sum_into(0, received)
        else:
            sums.append(np.zeros(codecs[part].capacity(part), np.uint8))
            codecs[part].decode_sum_encode(part, received, sums[-1])
    for codec in codecs:
        for part, buffer in enumerate(sums):
            codec.decode_into(part, buffer)
    return [b.tobytes() for buffers in sent for b in buffers] + [b.tobytes() for b in sums]


def left(groups):
    """Return the results, and what is remembered."""
    outputs = [member.output.tobytes() for group in groups for member in group]
    return outputs, [flattened(member.state) for group in groups for member in group]


def flattened(state):
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": held for key, held in flattened(value).items()}
        else:
            found[name] = value.tobytes()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("parts", [1, PARTS])
def test_results_are_those_of_each_member_alone(parts, dtype):
    together, alone = ([members(rank, dtype) for rank in range(PARTS)] for _ in range(2))
    for _ in range(2):  # residuals count from the second step on
        shared = reduced(together, parts)
        apart = [reduced([[g[i]] for g in alone], parts) for i in range(len(LENGTHS))]
        assert shared == [b"".join(pieces) for pieces in zip(*apart, strict=True)]
        assert left(together) == left(alone)


def test_the_tensor_whose_memory_does_not_fit_is_named():
    found = members(0)
    found[2].state["residual"] = np.zeros(5, np.float32)
    codec = BucketCodec(found, 1)
    with pytest.raises(CompressionFailed, match=r"encode_into of tensor 'w2' \[700\]: what is rem"):
        codec.encode_into(0, np.zeros(codec.capacity(0), np.uint8))


@pytest.mark.parametrize(("spec", "most"), [("none", 2), ("int8 | ef", 30)])
def test_a_small_tensor_more_costs_few_calls_a_step(spec, most):
    """Counted in the engine's thread, Python's functions and C's."""

    def cost(n):
        counted = []

        def rank_main(comm):
            engine = Engine(comm, open_control, Limits())
            try:
                asked = [Request(f"w{i}", shape=(1100,), spec=spec) for i in range(n)]
                group = engine.declare("g", asked, [parse(spec)] * n, [{} for _ in asked])
                x = [np.ones(1100, np.float32) for _ in asked]
                bucket = group.buckets[0]
                assert len(group.buckets) == 1
                encode, exchange = bucket._encode, bucket._exchange
                if comm.rank == 0:
                    bucket._encode = lambda: calls_of(encode, counted)
                    bucket._exchange = lambda *given: counting(exchange(*given), counted)
                for _ in range(3):
                    engine.extensions.settle()  # all of the step before has been counted
                    if comm.rank == 0:
                        counted.clear()
                    for request, values in zip(asked, x, strict=True):
                        group.submit(request.name, values)
                    group.wait(60)
            finally:
                engine.shutdown()

        run_local(rank_main, 2)
        return sum(counted)

    cost(10)
    assert (cost(200) - cost(100)) / 100 < most


def counting(steps, counted):
    while True:
        try:
            wire = calls_of(lambda: next(steps), counted)
        except StopIteration:
            return
        yield wire
