"""Many tensors a call: what becomes of each is what its own methods make of it, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import (
    CompressorError,
    Context,
    ErrorFeedback,
    Int8,
    PayloadError,
    PowerSGD,
    Workspace,
    parse,
)
from ringlet.compressors.base.batched import Exchanged, addresses, starts_of
from ringlet.compressors.base.contract import empty_payload, encoded
from ringlet.compressors.base.norms import clip
from ringlet.compressors.kernels.cpu.common import norms

SPECS = [
    "int8",
    "int8 | ef",
    "int8 | server_ef",
    "int4(bucket=32) | ef(decay=0.5)",
    "maxnorm(bits=3, stochastic=True) | ef",
    "minmax(bits=8) | min_size(0)",
    "minmax(bits=3, bucket=64) | ef",
    "qsgd(bits=5, bucket=64)",
    "fp16",
    "bf16 | ef",
    "fp16 | ef(decay=0.5)",
    "onebit | ef",
    "onebit(bucket=64)",
    "signsgd(scale=0.5)",
    "natural | ef(decay=0.5)",
    "natural(bucket=32)",
    "terngrad | ef",
    "terngrad(bucket=64, clip=9.0)",
    "topk(ratio=0.29)",
    "topk(ratio=0.001) | ef",
    "topk(ratio=0.29) | ef(decay=0.5)",
    "fp8",
    "fp8(format='e5m2', block=8) | ef(decay=0.5)",
    "mxfp8 | ef",
    "mxfp6(stochastic=True) | ef",
    "mxfp4",
    "nvfp4 | ef",
    "nvfp4(stochastic=True)",
    "block_topk(ratio=0.1) | ef",
    "block_topk(ratio=0.1, block=256, bits=16)",
    "block_topk(ratio=0.1, block=64, bits=8, dct=True) | ef(decay=0.5)",
    "block_topk(ratio=0.3, block=300, bits=2) | ef",
    "topk(ratio=0.29) | int8",
    "topk(ratio=0.29) | int8(bucket=32) | ef",
    "topk(ratio=0.29) | minmax(bits=3, bucket=32) | ef(decay=0.5)",
    "topk(ratio=0.5) | maxnorm(bits=3, stochastic=True) | ef",
    "topk(ratio=0.5) | topk(ratio=0.3) | int4 | ef",
    "topk(ratio=0.5) | onebit | ef",
    "topk | fp16 | ef",
    "block_topk(ratio=0.1) | fp8 | ef",
    "int8 | ef(dtype='bf16')",
    "topk(ratio=0.1) | ef(dtype='bf16', decay=0.5)",
    "topk(ratio=0.29) | int8(bucket=32) | ef(dtype='bf16')",
    "onebit | ef(dtype='bf16', reset=3)",
    "int4 | server_ef(dtype='bf16')",
    "int8 | ef(dtype='int8')",
    "topk(ratio=0.1) | int8 | ef(dtype='int8', decay=0.5, reset=3)",
    "topk(ratio=0.1) | momentum_correction",
    "block_topk(ratio=0.1) | momentum_correction(momentum=0.5)",
    "int8 | momentum_correction(masking=False)",
    "topk(ratio=0.29) | int8 | momentum_correction",
    "maxnorm(bits=5, stochastic=True) | momentum_correction",
    "fp16 | momentum_correction",
    "int8(bucket=32) | hadamard(block=64)",
    "int4(bucket=64) | hadamard(block=128) | ef",
    "fp8 | hadamard(block=64) | ef(dtype='bf16', decay=0.5)",
    "topk(ratio=0.3) | hadamard(block=128) | ef(dtype='int8')",
    "onebit | hadamard(block=64) | momentum_correction",
    "maxnorm(bits=4, stochastic=True) | hadamard(block=64) | ef(dtype='bf16')",
]
LENGTHS = [1, 7, 64, 511, 512, 513, 1000]
RANKS = 3


def values(n, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    if n == 511:
        x[17] = np.nan
    return x


def contexts(stage):
    return [
        Context(
            name=f"w{n}",
            shape=(n + 128,),
            numel=n + 128,
            offset=128,
            step=3,
            size=RANKS,
            stage=stage,
        )
        for n in LENGTHS
    ]


def arrays_in(state):
    """Return what is remembered, also by what is chained or wrapped."""
    for held in state.values():
        yield from arrays_in(held) if isinstance(held, dict) else [held]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("spec", SPECS)
def test_many_tensors_become_what_each_becomes_alone(spec, stage):
    c = parse(spec)
    batched = c.batched()
    ways = []
    for together in (True, False):
        around, sent, outs = contexts(stage), [], [np.empty(n, np.float32) for n in LENGTHS]
        for rank in range(RANKS):  # what is remembered goes on from one to the next
            xs = [values(n, rank) for n in LENGTHS]
            payloads = [empty_payload(c, n, ctx) for n, ctx in zip(LENGTHS, around, strict=True)]
            if together:
                rows = [batched.values(x, ctx) for x, ctx in zip(xs, around, strict=True)]
                batched.encode_into(rows, batched.table(payloads, LENGTHS))
            else:
                for each in zip(xs, payloads, around, strict=True):
                    c.encode_into(*each)
            sent.append(payloads)
        if together:
            tables = [batched.table(payloads, LENGTHS) for payloads in sent]
            drawn = [batched.decode_row(n, ctx) for n, ctx in zip(LENGTHS, around, strict=True)]
            batched.sum_into([out.ctypes.data for out in outs], tables, 0.3, drawn)
        else:
            for i, (out, ctx) in enumerate(zip(outs, around, strict=True)):
                c.sum_into([payloads[i] for payloads in sent], out, ctx)
                out *= np.float32(0.3)
        codes = [array for payloads in sent for p in payloads for array in p.values()]
        ways.append(codes + outs + [held for ctx in around for held in arrays_in(ctx.state)])
    assert len(ways[0]) == len(ways[1])
    for one, other in zip(*ways, strict=True):
        assert one.tobytes() == other.tobytes()


VARYING = [
    "threshold(value=1.0)",
    "threshold(value=0.5, cap=0.1) | ef",
    "threshold(value=2.0) | ef(decay=0.5, dtype='bf16')",
    "threshold(value=1.5, cap=0.05) | ef(dtype='int8', reset=2) | min_size(0)",
    "threshold(value=1.0) | momentum_correction",
    "threshold(value=1e39) | ef",
    "topk_sampled(ratio=0.1, sample=0.2)",
    "topk_sampled(ratio=0.3, sample=0.01) | ef",
    "sidco(ratio=0.1) | ef",
    "sidco(ratio=0.01, stages=1)",
    "sidco(ratio=0.001, stages=8) | ef(decay=0.5)",
    "sidco(ratio=1.0) | ef",
    "lossless",
    "lossless(dtype='fp32')",
    "lossless | ef(decay=0.5)",
]


def room_for(batched, n):
    return {part.name: np.empty(part.elements, part.dtype) for part in batched.layout(n)}


def varied_together(batched, xs, around):
    """Return the payloads of ``xs``, cut to the elements that the table tells of."""
    rooms = [room_for(batched, x.size) for x in xs]
    table = batched.table(rooms, [x.size for x in xs])
    batched.encode_into([batched.values(x, c) for x, c in zip(xs, around, strict=True)], table)
    return [
        {name: room[name][:count] for name, count in zip(batched.names, row[2::2], strict=True)}
        for room, row in zip(rooms, table.tolist(), strict=True)
    ]


def varied_both_ways(spec, steps):
    """Return payloads, sums and memories of ``steps``, lists of tensors: together, and alone."""
    c = parse(spec)
    batched, ways = c.batched(), []
    for together in (True, False):
        states, sent, found = [{} for _ in steps[0]], [], []
        for step, xs in enumerate(steps):
            around = [
                Context(name=f"w{i}", shape=x.shape, numel=x.size, state=state, step=step)
                for i, (x, state) in enumerate(zip(xs, states, strict=True))
            ]
            with np.errstate(all="ignore"):
                if together:
                    sent.append(varied_together(batched, xs, around))
                else:
                    sent.append([c.compress(x, ctx) for x, ctx in zip(xs, around, strict=True)])
            found += [(name, array) for each in sent[-1] for name, array in each.items()]
        outs = [np.empty_like(x) for x in steps[0]]
        if together:
            tables = [batched.table(payloads, [x.size for x in outs]) for payloads in sent]
            batched.sum_into([out.ctypes.data for out in outs], tables, 0.3)
        else:
            for i, out in enumerate(outs):
                with np.errstate(all="ignore"):
                    c.sum_into([payloads[i] for payloads in sent], out, around[i])
                    out *= np.float32(0.3)
        found += [("sum", out) for out in outs]
        found += [(name, held) for state in states for name, held in sorted(state.items())]
        ways.append([(name, array.dtype, array.tobytes()) for name, array in found])
    return ways


@pytest.mark.parametrize("spec", VARYING)
def test_many_tensors_of_variable_payloads_become_what_each_becomes_alone(spec):
    lengths = [*LENGTHS, 40_000]
    steps = [[values(n, 10 * step + n) for n in lengths] for step in range(4)]
    steps[1][2][5] = np.inf
    together, alone = varied_both_ways(spec, steps)
    assert together == alone


small = st.lists(
    hnp.arrays(
        np.float32,
        st.integers(1, 70),
        elements=st.one_of(
            st.floats(-3, 3, width=32), st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0])
        ),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(spec=st.sampled_from(VARYING), xs=small)
def test_payloads_of_variable_size_do_not_depend_on_company(spec, xs):
    together, alone = varied_both_ways(spec, [xs, [x[::-1].copy() for x in xs]])
    assert together == alone


@settings(max_examples=100, deadline=None)
@given(xs=small, value=st.sampled_from([0.5, 1.0, 2.5]))
def test_what_a_threshold_sends_and_keeps_is_what_float64_says(xs, value):
    batched = parse(f"threshold(value={value}) | ef").batched()
    residuals = [np.full(x.size, 0.25, np.float32) for x in xs]
    around = [
        Context(name=str(i), numel=x.size, state={"residual": held.copy()})
        for i, (x, held) in enumerate(zip(xs, residuals, strict=True))
    ]
    for x, ctx, sent in zip(xs, around, varied_together(batched, xs, around), strict=True):
        with np.errstate(over="ignore"):
            target = (x.astype(np.float64) + 0.25).astype(np.float32)
        reaches = ~(np.abs(target) < value)
        assert np.array_equal(sent["indices"], np.flatnonzero(reaches))
        assert np.array_equal(sent["values"], target[reaches], equal_nan=True)
        held = np.where(np.isfinite(target), np.where(reaches, 0, target), np.float32(0.25))
        assert np.array_equal(ctx.state["residual"], held)


def test_variable_payloads_that_make_no_sense_are_refused():
    for spec in ("threshold(value=1.0)", "lossless"):
        c, x = parse(spec), values(700, 1)
        batched, payload = c.batched(), c.compress(x, Context(numel=700))
        for name in batched.names:
            if payload[name].size:
                short = payload | {name: payload[name][:-1].copy()}
                table = batched.table([short], [700])
                with pytest.raises(PayloadError):
                    batched.sum_into([np.empty(700, np.float32).ctypes.data], [table])
    far = c.compress(x, Context(numel=700))
    far["widths"][0] = 7
    out, table = np.empty(700, np.float32), batched.table([far], [700])
    with pytest.raises(PayloadError):
        batched.sum_into([out.ctypes.data], [table])


@pytest.mark.parametrize("spec", ["topk(ratio=0.3)", "topk(ratio=0.3) | ef"])
def test_the_largest_are_found_where_a_sample_of_them_misleads(spec):
    """Of 40,000 every fourth is looked at first: these are too few, and some are not finite."""
    n, c, x = 40_000, parse(spec), values(40_000, 1)
    x[::4] += np.where(x[::4] < 0, -100, 100)
    x[8], x[12], x[13] = np.inf, np.nan, -np.inf
    alone, together = (Context(numel=n, shape=(n,)) for _ in range(2))
    batched = c.batched()
    for _ in range(2):
        sent = [empty_payload(c, n, ctx) for ctx in (alone, together)]
        c.encode_into(x, sent[0], alone)
        row = batched.values(x, together)
        batched.encode_into([row], batched.table(sent[1:], [n]))
        for name, array in sent[0].items():
            assert array.tobytes() == sent[1][name].tobytes()
        assert {8, 12, 13} <= {*sent[1]["indices"]}
        for name, held in alone.state.items():
            assert held.tobytes() == together.state[name].tobytes()


def test_an_index_beyond_its_tensor_is_refused():
    c, outs = parse("topk(ratio=0.1)"), [np.zeros(100, np.float32) for _ in range(2)]
    payloads = [c.compress(values(100, i), Context(numel=100)) for i in range(2)]
    payloads[1]["indices"][3] = 100
    batched = c.batched()
    table = batched.table(payloads, [100, 100])
    with pytest.raises(PayloadError, match=r"topk.* received an index beyond a tensor's elements"):
        batched.sum_into([out.ctypes.data for out in outs], [table])


class Louder(Int8):
    """A subclass that compresses in its own way."""

    def encode_into(self, x, payload, ctx):
        super().encode_into(x * 2, payload, ctx)


def test_what_compresses_in_its_own_way_is_not_passed_over():
    assert Louder().batched() is None
    assert (Louder() | parse("ef")).batched() is None
    for spec in (
        "topk | momentum_correction(clip=1.0)",
        "int8 | hadamard | hadamard(block=64)",
        "topk | lossless",
        "threshold | int8",
        "sidco | hadamard",
        "qsgd | scaled",
    ):
        assert parse(spec).batched() is None


def test_no_one_takes_residuals_without_a_kernel_that_renews_them():
    """Feedback behind it makes that kernel of the other two."""
    c, x = parse("topk(ratio=0.1) | int8"), values(100, 0)
    batched, payload = c.batched(), empty_payload(c, 100, Context())
    table, residual = batched.table([payload], [100]), np.zeros(100, np.float32)
    with pytest.raises(CompressorError, match="has no kernel that renews residuals"):
        batched.encode_into([(x.ctypes.data, residual.ctypes.data, 0, 0)], table)
    assert ErrorFeedback(inner=c).batched().encode_fed is not None


def test_kernels_are_given_no_address_of_what_does_not_fit():
    batched, c = parse("int8 | ef").batched(), parse("int8 | ef")
    payload = empty_payload(c, 100, Context())
    with pytest.raises(
        PayloadError, match=r"'codes' is uint8\[100\], its layout says uint8\[101\]"
    ):
        batched.table([payload], [101])
    with pytest.raises(CompressorError, match=r"flat arrays without gaps, not \[50\]"):
        batched.values(np.zeros(100, np.float32)[::2], Context(numel=50))
    remembering = Context(numel=10, state={"residual": np.zeros(9, np.float32)})
    with pytest.raises(CompressorError, match=r"float32\[9\], not float32\[10\]"):
        batched.values(np.zeros(10, np.float32), remembering)


SHAPES = [(5, 64), (64, 36), (33, 7, 3), (100, 3), (17, 1300), (256, 256), (7,), (1025,)]


def exchanged_together(c, tensors, scale):
    """Return what was sent in each round, whose results are ``scale`` times that, or it itself."""
    rounds, running = [], c.batched_rounds().exchange(tensors)
    kept = []  # what a mean lies in must last until the next is written
    asked = next(running)
    try:
        while True:
            kept.append(np.empty(sum(asked.lengths), asked.dtype))
            places = addresses(kept[-1], starts_of(asked.lengths))
            asked.write(places)
            rounds.append(kept[-1].copy())
            kept[-1][:] = scaled(kept[-1], scale)
            asked = running.send(places)
    except StopIteration:
        return rounds


def scaled(values, scale):
    return values * np.float32(scale) if values.dtype == np.float32 else values


def exchanged_alone(c, tensors, scale):
    found = []
    for x, out, ctx, _ in tensors:
        rounds, running = [], c.exchange(x, out, ctx)
        asked = next(running)
        try:
            while True:
                rounds.append(asked.values.copy())
                asked = running.send(scaled(asked.values, scale).copy())
        except StopIteration:
            found.append(rounds)
    return [np.concatenate(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("spec", [
    "powersgd", "powersgd(rank=3) | ef", "powersgd(rank=1, warm_start=False) | ef(decay=0.5)",
    "powersgd(rank=5) | ef(reset=2) | min_size(0)", "powersgd(rank=2, warm_start=False)",
    "acpsgd", "acpsgd(rank=3) | ef", "acpsgd(rank=1) | ef(decay=0.5)", "shared_int",
    "shared_int(stochastic=True) | ef", "shared_int(bits=16, bucket=64) | ef(decay=0.5)",
    "shared_int(bits=32, stochastic=True)", "terngrad_shared", "terngrad_shared(clip=0.5) | ef",
    "terngrad_shared(clip=0.0) | ef(decay=0.5)",
])  # fmt: skip
def test_tensors_that_exchange_together_become_what_each_becomes_alone(spec, in_place):
    c = parse(spec)
    shapes = [shape for shape in SHAPES if c.batched_rounds().takes(shape)]
    ways = []
    for exchanged in (exchanged_together, exchanged_alone):
        states, found = [{} for _ in shapes], []
        for step in range(4):
            xs = [values(int(np.prod(shape)), step) for shape in shapes]
            xs[1][5] = np.inf if step == 2 else 1
            block = xs[2].reshape(shapes[2][0], -1)  # all zeros but one block, first the other one
            block[len(block) // 2 :, :] = block[:, block.shape[1] // 2 :] = 0
            xs[2][:] = xs[2][::-1].copy() if step > 1 else xs[2]
            outs = xs if in_place else [np.empty_like(x) for x in xs]
            around = [
                Context(name=f"w{i}", shape=shape, numel=x.size, state=state, step=step, size=RANKS)
                for i, (shape, x, state) in enumerate(zip(shapes, xs, states, strict=True))
            ]
            tensors = [Exchanged(*each) for each in zip(xs, outs, around, strict=True)]
            found += [*exchanged(c, tensors, 0.75), *outs]
        found += [state[key] for state in states for key in sorted(state)]
        ways.append([array.tobytes() for array in found])
    assert ways[0] == ways[1]


def test_what_exchanges_in_its_own_way_is_not_passed_over():
    class Odd(PowerSGD):
        def exchange(self, x, out, ctx, local=None):
            yield from super().exchange(x, out, ctx, local)

    class Fed(ErrorFeedback):
        def residual(self, n, ctx):
            return super().residual(n, ctx)

    assert Odd().batched_rounds() is None
    assert (PowerSGD() | Fed()).batched_rounds() is None
    assert parse("powersgd | ef(dtype='bf16')").batched_rounds() is None
    assert parse("int8 | ef").batched_rounds() is None


@pytest.mark.parametrize(("spec", "rounds"), [
    ("powersgd", 1), ("powersgd | ef", 1), ("acpsgd", 0), ("acpsgd | ef", 0),
    ("shared_int | ef", 0), ("shared_int | ef", 1),
])  # fmt: skip
def test_an_exchange_of_many_that_is_given_up_leaves_what_is_remembered(spec, rounds):
    c, x = parse(spec), values(64 * 36, 0)
    state, workspace = {}, Workspace()
    around = [
        Context(shape=(64, 36), numel=x.size, state=state, size=RANKS, workspace=workspace)
        for _ in range(2)
    ]
    exchanged_together(c, [Exchanged(x, np.empty_like(x), around[0])], 1.0)
    before = {name: np.copy(held) for name, held in state.items()}
    given_up = c.batched_rounds().exchange([Exchanged(x, np.empty_like(x), around[1])])
    asked = next(given_up)
    for _ in range(rounds):
        buffer = np.zeros(asked.lengths[0], asked.dtype)
        asked = given_up.send(addresses(buffer, [0]))
    given_up.close()
    assert before.keys() == state.keys()
    assert all(np.array_equal(before[name], state[name]) for name in before)


anything = hnp.arrays(np.float32, st.integers(1, 100), elements=st.floats(width=32))


@settings(max_examples=100, deadline=None)
@given(
    xs=st.lists(anything, min_size=1, max_size=4),
    clip=st.sampled_from([0.0, 0.25, 1.0, 2.5]),
    fed=st.booleans(),
)
def test_ternary_codes_on_shared_scales_are_those_of_each_tensor_alone(xs, clip, fed):
    """Also of values that are not finite, or too large for a square in float32."""
    c, ways = parse(f"terngrad_shared(clip={clip}){' | ef' if fed else ''}"), []
    for exchanged in (exchanged_together, exchanged_alone):
        states, found = [{} for _ in xs], []
        for step in range(2):
            tensors = [
                Exchanged(x, np.empty_like(x), Context(name=str(i), numel=x.size, state=state))
                for i, (x, state) in enumerate(zip(xs, states, strict=True))
            ]
            for tensor in tensors:
                tensor.ctx.step = step
            with np.errstate(all="ignore"):
                found += exchanged(c, tensors, 1.0) + [tensor.out for tensor in tensors]
        found += [held for state in states for held in state.values()]
        ways.append([array.tobytes() for array in found])
    assert ways[0] == ways[1]


@settings(max_examples=100, deadline=None)
@given(x=anything, times=st.sampled_from([0.25, 1.0, 2.5]))
def test_values_are_clipped_at_root_mean_squares_in_float64(x, times):
    out, alone, ctx = np.empty_like(x), np.empty_like(x), Context(numel=x.size)
    norms.clip_at(x, times, out)
    clip(x, times, alone, ctx)
    assert np.array_equal(out, alone, equal_nan=True)
    if not np.isfinite(x).all():
        assert np.array_equal(out, x, equal_nan=True)
        return
    exact = x.astype(np.float64)
    most = times * np.sqrt(np.mean(exact**2))
    close = np.maximum(np.abs(np.clip(exact, -most, most)) * 2.0**-22, 1e-45)
    assert (np.abs(out - np.clip(exact, -most, most)) <= close).all()


EF21S = ["int8(bucket=32) | ef21", "topk(ratio=0.3) | ef21", "threshold(value=0.5) | ef21",
         "topk(ratio=0.3) | int8 | ef21 | min_size(0)", "topk(ratio=1.0) | ef21"]  # fmt: skip


def followed_both_ways(spec, steps):
    """Return what one rank sends in each step, its results, and what it remembers, both ways."""
    c = parse(spec)
    batched, ways = c.batched(), []
    for together in (True, False):
        states, found = [{} for _ in steps[0]], []
        for step, xs in enumerate(steps):
            around = [
                Context(name=f"w{i}", numel=x.size, state=state, step=step)
                for i, (x, state) in enumerate(zip(xs, states, strict=True))
            ]
            outs, lengths = [np.empty_like(x) for x in xs], [x.size for x in xs]
            if together:
                sent = varied_together(batched, xs, around) if batched.varies else [
                    empty_payload(c, n, ctx) for n, ctx in zip(lengths, around, strict=True)
                ]  # fmt: skip
                if not batched.varies:
                    rows = [batched.values(x, ctx) for x, ctx in zip(xs, around, strict=True)]
                    batched.encode_into(rows, batched.table(sent, lengths))
                own, places = [np.empty_like(x) for x in xs], [out.ctypes.data for out in outs]
                for where in (places, [out.ctypes.data for out in own]):
                    batched.sum_into(where, [batched.table(sent, lengths)])
                rows = [batched.finishing.row(n, x) for n, x in zip(lengths, around, strict=True)]
                known = (rows, lengths, places, [out.ctypes.data for out in own])
                batched.finishing.finish(*(np.array(each, np.uint64) for each in known))
            else:
                with np.errstate(all="ignore"):
                    sent = [encoded(c, x, ctx) for x, ctx in zip(xs, around, strict=True)]
                    for payload, out, ctx in zip(sent, outs, around, strict=True):
                        c.sum_into([payload], out, ctx)
                        c.finish(out, ctx)
            found += [array for payload in sent for array in payload.values()] + outs
        for state in states:
            found += [state[name] for name in ("worker", "server")]
        ways.append(found)
    return ways


@settings(max_examples=100, deadline=None)
@given(spec=st.sampled_from(EF21S), xs=small)
def test_what_ef21_remembers_does_not_depend_on_company(spec, xs):
    steps = [xs, [x[::-1].copy() for x in xs], xs, xs]
    together, alone = followed_both_ways(spec, steps)
    assert [each.tobytes() for each in together] == [each.tobytes() for each in alone]


@settings(max_examples=100, deadline=None)
@given(xs=small)
def test_ef21_that_sends_everything_follows_as_float64_says(xs):
    """g + (x - g), each sum rounded once; what is not finite is returned, and not remembered."""
    (*_, worker, server), _ = followed_both_ways("topk(ratio=1.0) | ef21", [xs[:1], -xs[0][None]])
    g = np.zeros(xs[0].size, np.float32)
    for x in (xs[0], -xs[0]):
        with np.errstate(all="ignore"):
            change = (x.astype(np.float64) - g).astype(np.float32)
            total = (g.astype(np.float64) + change).astype(np.float32)
        g = np.where(np.isfinite(total), total, g)
    assert np.array_equal(worker, g)
    assert np.array_equal(server, g)
