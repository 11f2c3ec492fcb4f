"""Small members of a bucket share calls: their results are those that each has alone."""

import numpy as np
import pytest
from counted_calls import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import PayloadError, parse
from ringlet.fusion import CompressionFailed, Engine, Limits, Request
from ringlet.fusion.buckets.bucket import SumBucket
from ringlet.fusion.codecs import small_members, varying_members
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.codecs.small_members import MOST
from ringlet.fusion.devices.host import Place
from ringlet.fusion.planning.member import Member
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.dtypes import storage
from ringlet.ring.transports.local import run_local

LENGTHS = [1030, 3, 700, 2049, MOST + 5, 512]
PARTS = 3


def members(
    rank,
    dtype="float32",
    spec="int8 | ef | min_size(0)",
    lengths=LENGTHS,
    however_small=False,
    **asked,
):
    """Return members of ``dtype``, or of several in turn, which take gradients of the rank."""
    dtypes = [dtype] if isinstance(dtype, str) else dtype
    found, place = [], Place()
    for i, n in enumerate(lengths):
        kind = dtypes[i % len(dtypes)]
        request = Request(f"w{i}", shape=(n,), spec=spec, dtype=kind, **asked)
        given = request, parse(spec), rank, PARTS, 0, place
        found.append(Member(*given, however_small=however_small))
        x = gradient(rank, i, n, kind)
        found[-1].take(x, x)
    return found


def gradient(rank, i, n, dtype="float32", gap=1):
    """Return n values; with a ``gap`` above 1 they do not lie one behind the other."""
    x = np.random.default_rng(100 * rank + i).standard_normal(n).astype(np.float32)
    wide = np.zeros(n * gap, storage(dtype))
    wide[::gap] = (x.view(np.uint32) >> 16) if dtype == "bfloat16" else x
    return wide[::gap]


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
        seen = codec.finish()
        for member in codec.members:
            if member not in seen:
                member.see()
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
            found[name] = value.tobytes() if isinstance(value, np.ndarray) else value
    return found


@pytest.mark.parametrize(
    "spec", ["int8 | ef", "int4(bucket=32) | hadamard(block=64) | ef", "int8 | ef21"]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", ("float32", "bfloat16", "float64")])
@pytest.mark.parametrize("parts", [1, PARTS])
def test_results_are_those_of_each_member_alone(parts, dtype, spec):
    spec += " | min_size(0)"
    together, alone = ([members(rank, dtype, spec) for rank in range(PARTS)] for _ in range(2))
    for _ in range(2):  # residuals count from the second step on
        shared = reduced(together, parts)
        apart = [reduced([[g[i]] for g in alone], parts) for i in range(len(LENGTHS))]
        assert shared == [b"".join(pieces) for pieces in zip(*apart, strict=True)]
        assert left(together) == left(alone)


@settings(max_examples=50, deadline=None)
@given(
    spec=st.sampled_from(
        [
            "int8 | ef | min_size(0)",
            "int4(bucket=32, stochastic=True) | min_size(0)",
            "int4(bucket=32) | ef(decay=0.5, reset=2) | min_size(0)",
            "onebit(bucket=32) | ef | min_size(0)",
            "signsgd(bucket=32) | min_size(0)",
            "terngrad(bucket=32) | ef | min_size(0)",
            "topk(ratio=0.1) | ef",
            "int4(bucket=32) | hadamard(block=64) | ef | min_size(0)",
            "int8(bucket=32) | hadamard(block=256) | min_size(0)",
            "int8 | ef(dtype='bf16') | min_size(0)",
            "topk(ratio=0.3) | ef(dtype='bf16', decay=0.5, reset=2)",
            "int8 | ef(dtype='int8') | min_size(0)",
            "topk(ratio=0.3) | momentum_correction",
            "onebit(bucket=32) | momentum_correction(masking=False) | min_size(0)",
            "topk(ratio=0.3) | int8 | ef(decay=0.5)",
            "topk(ratio=0.3) | maxnorm(stochastic=True) | ef",
            "int8(bucket=32) | ef21 | min_size(0)",
            "maxnorm(bucket=32, stochastic=True) | ef21 | min_size(0)",
            "topk(ratio=0.3) | int8 | ef21",
            "int4(bucket=32) | hadamard(block=64) | ef21 | min_size(0)",
        ]
    ),
    parts=st.sampled_from([1, PARTS]),
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=6),
    dtypes=st.lists(
        st.sampled_from(["float32", "float16", "bfloat16", "float64"]), min_size=1, max_size=3
    ),
    prescale=st.sampled_from([1.0, 0.3]),
    gap=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 150, 1 << 17]),
)
def test_payloads_do_not_depend_on_company(spec, parts, lengths, dtypes, prescale, gap, group):
    def groups():
        found = []
        for rank in range(PARTS):
            found.append(members(rank, dtypes, spec, lengths, prescale=prescale))
            for i, member in enumerate(found[-1]):
                x = gradient(rank, i, member.numel, member.request.dtype, gap)
                member.take(x, x)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_members, "_GROUP", group)
        together, alone = groups(), groups()
        for _ in range(3):
            shared = reduced(together, parts)
            apart = [reduced([[g[i]] for g in alone], parts) for i in range(len(lengths))]
            assert shared == [b"".join(pieces) for pieces in zip(*apart, strict=True)]
            assert left(together) == left(alone)
            for member in [member for group in together + alone for member in group]:
                member.count()


VARYING = [
    "threshold(value=1.0) | ef | min_size(0)",
    "threshold(value=0.5, cap=0.1) | ef(dtype='bf16') | min_size(0)",
    "topk_sampled(ratio=0.1, sample=0.1) | ef | min_size(0)",
    "sidco(ratio=0.1) | momentum_correction | min_size(0)",
    "lossless | min_size(0)",
    "lossless(dtype='fp32') | min_size(0)",
    "threshold(value=1.0) | ef21 | min_size(0)",
]


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(VARYING),
    lengths=st.lists(st.sampled_from([0, 1, 3, 200, 513, MOST + 1]), min_size=2, max_size=6),
    dtypes=st.lists(
        st.sampled_from(["float32", "float16", "bfloat16", "float64"]), min_size=1, max_size=3
    ),
    prescale=st.sampled_from([1.0, 0.3]),
    run=st.sampled_from([1, 600, 1 << 17]),
)
def test_payloads_of_variable_size_do_not_depend_on_company(spec, lengths, dtypes, prescale, run):
    def groups():
        asked = dtypes, spec, lengths, True
        return [members(rank, *asked, prescale=prescale) for rank in range(PARTS)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varying_members, "_RUN", run)
        together, alone = groups(), groups()
        for _ in range(3):
            shared = reduced(together, 1)
            apart = [reduced([[g[i]] for g in alone], 1) for i in range(len(lengths))]
            assert shared == [b"".join(pieces) for pieces in zip(*apart, strict=True)]
            assert left(together) == left(alone)
            for member in [member for group in together + alone for member in group]:
                member.count()


@pytest.mark.parametrize("spec", VARYING[::4])
def test_other_bytes_are_told_of_as_a_tensor_alone_tells_of_them(spec):
    """Every byte of a payload is spoilt in turn; what still makes sense decodes to the same."""
    told = []
    for way in (lambda codec: codec, alone_again):
        codec = way(BucketCodec(members(0, spec=spec, lengths=[40, 600, 7]), 1))
        codec.prepare()
        sent = np.zeros(codec.capacity(0), np.uint8)
        codec.encode_into(0, sent)
        heads = [*range(100), *range(len(sent) // 2, len(sent) // 2 + 60), len(sent) - 1]
        for place in heads:
            spoilt = sent.copy()
            spoilt[place] ^= 0x81
            try:
                codec.decode_sum_into(0, [sent, spoilt])
                told.append([member.output.tobytes() for member in codec.members])
            except (CompressionFailed, PayloadError, ValueError) as error:
                told.append(str(error))
        for stop in (0, 3, 9, 40, len(sent) - 1):
            try:
                codec.decode_sum_into(0, [sent, sent[:stop]])
                told.append("decoded")
            except (CompressionFailed, PayloadError, ValueError) as error:
                told.append(str(error))
    assert told[: len(told) // 2] == told[len(told) // 2 :]
    assert len({*map(str, told)}) > 3


def alone_again(codec):
    """Return a codec whose members have calls of their own."""
    codec._varying, codec._single = None, [range(len(codec.members))]
    return codec


def test_what_is_known_of_a_gradient_is_replaced_between_steps_and_given_up_steps_leave_it():
    together, alone = (
        [members(rank, spec="int8 | ef21 | min_size(0)") for rank in range(PARTS)] for _ in range(2)
    )
    codecs = [BucketCodec(group, 1) for group in together]
    for step in range(4):
        if step == 2:
            for group in together + alone:
                for i, member in enumerate(group):
                    member.state["worker"] = gradient(step, i, member.numel)
                    member.state["server"] = gradient(step + 1, i, member.numel)
        sent = []
        for codec in codecs:
            codec.prepare()
            sent.append(np.zeros(codec.capacity(0), np.uint8))
            codec.encode_into(0, sent[-1])
        for group in alone:
            for member in group:
                single = BucketCodec([member], 1)
                single.prepare()
                single.encode_into(0, np.zeros(single.capacity(0), np.uint8))
        if step != 1:  # which is given up
            for codec in codecs:
                codec.decode_sum_into(0, sent)
                seen = codec.finish()
                assert len(seen) == len(LENGTHS) - 1
                (large,) = {*codec.members} - seen
                large.see()
            ends = np.cumsum([0, *(BucketCodec([m], 1).capacity(0) for m in alone[0])])
            for group in alone:
                for member, a, b in zip(group, ends, ends[1:], strict=False):
                    BucketCodec([member], 1).decode_sum_into(0, [each[a:b] for each in sent])
                    member.see()
            assert left(together) == left(alone)


def test_what_replaces_a_residual_is_used_in_the_next_step():
    together, alone = ([members(rank) for rank in range(PARTS)] for _ in range(2))
    codecs = [BucketCodec(group, 1) for group in together]
    for step in range(2):
        for way in (together, alone):
            for group in way:
                for i, member in enumerate(group):
                    member.state["residual"] = gradient(step, i, member.numel)
        for group, codec in zip(alone, codecs, strict=True):
            codec.prepare()
            found = np.zeros(codec.capacity(0), np.uint8)
            codec.encode_into(0, found)
            singly = [BucketCodec([member], 1) for member in group]
            payloads = [np.zeros(one.capacity(0), np.uint8) for one in singly]
            for one, payload in zip(singly, payloads, strict=True):
                one.encode_into(0, payload)
            assert found.tobytes() == b"".join(payload.tobytes() for payload in payloads)
    assert left(together) == left(alone)


def summed(groups):
    """Let the buckets of ``groups``, by rank, encode and decode the sum of what all have sent."""
    buckets = [SumBucket(group, PARTS) for group in groups]
    for bucket in buckets:
        bucket._encode()
    sent = [bucket._buffer.copy() for bucket in buckets]
    for bucket in buckets:
        bucket._buffer[...] = sent[0]  # any payload will do, where it is the same
        bucket._decode_all()
        bucket._lease.release()
    return [buffer.tobytes() for buffer in sent]


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(["fp16", "bf16", "fp16 | ef", "bf16 | ef(decay=0.5)"]),
    op=st.sampled_from([ReduceOp.AVERAGE, ReduceOp.SUM]),
    lengths=st.lists(st.sampled_from([1, 3, 64, 130, MOST + 1]), min_size=2, max_size=5),
    dtypes=st.lists(
        st.sampled_from(["float32", "float16", "bfloat16", "float64"]), min_size=1, max_size=3
    ),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]),
    gap=st.sampled_from([1, 3]),
    wide=st.booleans(),
)
def test_sums_do_not_depend_on_company(spec, op, lengths, dtypes, scales, gap, wide):
    def groups():
        found, (prescale, postscale) = [], scales
        for rank in range(PARTS):
            asked = {"op": op, "prescale": prescale, "postscale": postscale}
            found.append(members(rank, dtypes, spec, lengths, **asked))
            for i, member in enumerate(found[-1]):
                x = gradient(rank, i, member.numel, member.request.dtype, gap)
                half = member.request.dtype in ("float16", "bfloat16")
                member.take(x, np.zeros(x.size, np.float32) if wide and half else x)
        return found

    together, alone = groups(), groups()
    for _ in range(2):
        shared = summed(together)
        apart = [summed([[g[i]] for g in alone]) for i in range(len(lengths))]
        assert shared == [b"".join(pieces) for pieces in zip(*apart, strict=True)]
        assert left(together) == left(alone)


def test_the_tensor_whose_memory_does_not_fit_is_named():
    found = members(0)
    found[2].state["residual"] = np.zeros(5, np.float32)
    codec = BucketCodec(found, 1)
    with pytest.raises(CompressionFailed, match=r"encode_into of tensor 'w2' \[700\]: what is rem"):
        codec.encode_into(0, np.zeros(codec.capacity(0), np.uint8))


CODECS = ("int8", "onebit", "topk", "fp8", "mxfp4", "nvfp4", "block_topk")


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("none", 2),
        ("fp16", 6),
        *((f"{codec} | ef", 7) for codec in CODECS),
        ("int8(stochastic=True) | ef", 7),
        ("natural", 7),
        ("int8 | ef(dtype='bf16')", 7),
        ("int8 | ef(dtype='int8')", 9),  # which remembers two arrays
        ("topk | momentum_correction", 9),
        ("int8 | ef21", 9),  # which remembers two arrays, and finishes
        ("threshold | ef", 12),
        ("sidco | ef", 12),
        ("lossless", 12),
    ],
)
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
                together = bucket._finish_together
                if comm.rank == 0:
                    bucket._encode = lambda: calls_of(encode, counted)
                    bucket._finish_together = lambda: calls_of(together, counted)
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
