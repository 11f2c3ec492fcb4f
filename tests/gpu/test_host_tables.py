"""Launches over many tensors, other inputs, sums encoded again, flags: against plain NumPy code."""

import numpy as np
import pytest

from ringlet.compressors import Context, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.kernels.cuda.common.bucketed import Output, Target

RNG = np.random.default_rng(11)
SPECS = ["fp16", "int8", "int4(stochastic=True)", "onebit", "minmax", "fp8"]
LENGTHS = [1, 8, 513, 1000, 0, 4096, 33] * 6  # 42 tensors: more than one launch takes


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    codecs = [parse(spec).cuda() for spec in SPECS]
    switches = [
        ("encode", {}),
        ("encode", {"FEEDBACK": 1}),
        ("decode", {}),
        ("decode", {"ADDING": 1}),
    ]
    switches += [("encode", {"SUMMED": 1}), ("encode", {"SUMMED": 1, "FEEDBACK": 1})]
    switches += [("encode", {"INPUT": 1}), ("encode", {"INPUT": 2})]
    host.prepare([codec.program(kernel, **on) for codec in codecs for kernel, on in switches])


def normal(n):
    return RNG.standard_normal(n).astype(np.float32)


def context(n, i=0, **kw):
    return Context(name=f"w{i}", numel=n, shape=(n,), **kw)


def payload(c, n):
    return empty_payload(c, n, context(n))


def arrays(c, p):
    return [p[name] for name in c.strides()]


def assert_same(a, b):
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("feedback", [False, True])
def test_one_launch_encodes_many_tensors(spec, feedback, host):
    c = parse(spec)
    xs = [normal(n) for n in LENGTHS]
    residuals = [normal(n) for n in LENGTHS]
    expected, targets, found, kept = [], [], [], []
    for i, (x, residual) in enumerate(zip(xs, residuals, strict=True)):
        ctx, made = context(x.size, i), payload(c, x.size)
        mine = residual.copy()
        if feedback:
            c.feedback_into(x * np.float32(0.25), residual, 0.5, made, ctx)
        else:
            c.encode_into(x * np.float32(0.25), made, ctx)
        expected.append(made)
        found.append(payload(c, x.size))
        kept.append(mine)
        targets.append(
            Target(x, x.size, arrays(c, found[-1]), mine if feedback else None, ctx.key())
        )
    before = host.launches
    c.cuda().encode(host, targets, decay=0.5, scale=0.25)
    assert host.launches == before + 2
    for a, b in zip(expected, found, strict=True):
        assert_same(a, b)
    if feedback:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(residuals, kept, strict=True))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("feedback", [False, True])
def test_sums_are_encoded_again_in_one_pass(spec, feedback, host):
    c, shards = parse(spec), 5
    targets, expected, residuals = [], [], []
    for i, n in enumerate(LENGTHS):
        payloads = [payload(c, n) for _ in range(shards)]
        for rank, made in enumerate(payloads):
            c.encode_into(normal(n), made, context(n, i, rank=rank))
        total, made, residual = np.zeros(n, np.float32), payload(c, n), normal(n)
        mine = residual.copy()
        c.sum_into(payloads, total, context(n))
        total *= np.float32(0.2)
        ctx = context(n, i, stage=2)
        if feedback:
            c.feedback_into(total, residual, 1.0, made, ctx)
        else:
            c.encode_into(total, made, ctx)
        found = payload(c, n)
        expected.append((made, found))
        residuals.append((residual, mine))
        sources = [arrays(c, p) for p in payloads]
        kept = mine if feedback else None
        targets.append(Target(None, n, arrays(c, found), kept, ctx.key(), 0, sources))
    c.cuda().encode(host, targets, scale=0.2)
    for made, found in expected:
        assert_same(made, found)
    if feedback:
        assert all(a.tobytes() == b.tobytes() for a, b in residuals)


@pytest.mark.parametrize("shards", [1, 96, 97, 200])
def test_sums_of_any_number_of_payloads(shards, host):
    c, n = parse("int8"), 700
    payloads = [payload(c, n) for _ in range(shards)]
    for made in payloads:
        c.encode_into(normal(n), made, context(n))
    sums = [np.full(n, 9, np.float32) for _ in range(2)]
    c.sum_into(payloads, sums[0], context(n))
    sources = [arrays(c, p) for p in payloads]
    c.cuda().decode(host, [Output(sums[1], sources)])
    assert sums[0].tobytes() == sums[1].tobytes()


def test_a_sum_of_too_many_payloads_is_refused(host):
    c, n = parse("int8"), 8
    sources = [arrays(c, payload(c, n))] * 96
    with pytest.raises(ValueError, match="at most 95 payloads"):
        c.cuda().encode(host, [Target(None, n, arrays(c, payload(c, n)), sources=sources)])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["float16", "uint16"])
@pytest.mark.parametrize("n", [5, 2000])
def test_half_precision_is_read_as_it_is(spec, kind, n, host):
    c = parse(spec)
    if kind == "float16":
        half = normal(n).astype(np.float16)
        wide = half.astype(np.float32)
    else:
        half = (normal(n).view(np.uint32) >> 16).astype(np.uint16)
        wide = (half.astype(np.uint32) << 16).view(np.float32)
    made, found = payload(c, n), payload(c, n)
    c.encode_into(wide, made, context(n))
    c.cuda().encode(host, [Target(half, n, arrays(c, found), None, context(n).key())])
    assert_same(made, found)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_flag_tells_what_is_not_finite(spec, bad, host):
    c, n = parse(spec), 1300
    x, flag = normal(n), np.zeros(1, np.int32)
    found = arrays(c, payload(c, n))
    c.cuda().encode(host, [Target(x, n, found)], flag=flag)
    assert flag[0] == 0
    x[1200] = bad
    c.cuda().encode(host, [Target(x, n, found)], flag=flag)
    assert flag[0] == 1


def test_overflow_of_a_cast_is_flagged(host):
    x, flag = np.full(9, 7e4, np.float32), np.zeros(1, np.int32)
    c = parse("fp16")
    c.cuda().encode(host, [Target(x, 9, arrays(c, payload(c, 9)))], flag=flag)
    assert flag[0] == 1


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shift", [1, 3])
def test_arrays_may_begin_anywhere(spec, shift, host):
    c, n, xp = parse(spec), 1100, host.module
    x, out = normal(n + shift)[shift:], np.zeros(n + shift, np.float32)[shift:]
    residual = normal(n + shift)[shift:]
    mine = residual.copy()
    made = payload(c, n)
    found = {name: np.zeros(a.size + shift, a.dtype)[shift:] for name, a in made.items()}
    c.feedback_into(x, mine, 1.0, made, context(n))
    c.feedback_into(x, residual, 1.0, found, context(n, xp=xp))
    assert_same(made, found)
    assert mine.tobytes() == residual.tobytes()
    expected = np.zeros(n, np.float32)
    c.accumulate(made, expected, context(n))
    c.accumulate(found, out, context(n, xp=xp))
    assert out.tobytes() == expected.tobytes()
