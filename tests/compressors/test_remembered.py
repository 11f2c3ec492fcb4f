"""What is remembered, and what kernels are given, is looked at before it is used."""

import copy
import types

import numpy as np
import pytest

from ringlet.compressors import (
    CompressorError,
    Context,
    PayloadError,
    Workspace,
    parse,
)
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.kernels.cuda.common import bucketed, elementwise
from ringlet.compressors.kernels.cuda.common.operands import Operands
from ringlet.compressors.kernels.cuda.lowrank import factors as cuda_factors
from ringlet.compressors.kernels.cuda.lowrank import products as cuda_products
from ringlet.compressors.kernels.cuda.modifiers import hadamard, state_updates
from ringlet.compressors.kernels.cuda.quantizers import shared_int as cuda_shared
from ringlet.compressors.kernels.cuda.sparsifiers import randomk
from ringlet.compressors.kernels.cuda.sparsifiers import topk as cuda_select
from ringlet.compressors.lowrank.factors import keep, orthonormal
from ringlet.compressors.lowrank.products import Source, product, product_and_lost
from ringlet.compressors.specs.registry import names
from ringlet.compressors.testing.tools.simulate import context, encode, simulate

plain = types.ModuleType("plain")
plain.__dict__.update(np.__dict__)

SHAPE = (128, 200)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def step(compressor, states, number, shape=SHAPE):
    """Run a step of all ranks, which must agree; return the result."""
    gradients = [normal(100 * number + rank, *shape).reshape(-1) for rank in range(len(states))]
    outs = simulate(compressor, gradients, states, number, shape=shape)
    assert len({out.tobytes() for out in outs}) == 1, "ranks hold different results"
    assert np.isfinite(outs[0]).all()
    return outs[0].reshape(shape)


# -- factors of another rank --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
def test_a_rank_may_follow_a_schedule(name):
    compressor = parse(f"{name}(rank=2) | ef | warmup(steps=8, ramp='rank', start=32, dense=1)")
    states = [{}, {}]
    for number in range(12):
        step(compressor, states, number)
        rank = getattr(compressor.at(number), "inner", None)
        if rank is not None:
            factors = [states[0][side] for side in ("left", "right") if side in states[0]]
            assert factors, "a factor is remembered"
            # ACP-SGD renews one factor a step, and refits the other when that is next used.
            assert any(len(factor) == rank.rank for factor in factors)


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
@pytest.mark.parametrize(("before", "after"), [(16, 2), (2, 16)])
def test_rows_are_kept_where_they_fit(name, before, after):
    """What goes on with another rank goes on as if it had been given these rows and no others."""
    states = [{}, {}]
    for number in range(4):
        step(parse(f"{name}(rank={before})"), states, number)
    old = copy.deepcopy(states[0])
    # A stranger draws the rows that are new in this very step.
    drawn = [{}, {}]
    step(parse(f"{name}(rank={after})"), drawn, 4)
    now = parse(f"{name}(rank={after})")
    fresh = _started(now, 4, left=int(name == "acpsgd"))  # sent, and renewed, in an even step
    prepared = [{}, {}]
    for state in prepared:
        for side, rows in old.items():
            state[side] = fresh[side].copy()
            fitting = min(before, after)
            state[side][:fitting] = rows[:fitting]
    np.testing.assert_array_equal(step(now, states, 4), step(now, prepared, 4))
    for number in range(5, 9):
        np.testing.assert_array_equal(step(now, states, number), step(now, prepared, number))
    assert all(len(rows) == after for rows in states[0].values())


def _started(compressor, number, left=0):
    """Return the factors that a step draws where none are remembered, by stream."""
    drawn = {}
    for side, length in (("left", SHAPE[0]), ("right", SHAPE[1])):
        rows = np.empty((compressor.rank, length), np.float32)
        ctx = Context(name="tensor", shape=SHAPE, step=number, size=2)
        stream = left if side == "left" else 0
        ctx.rng(shared=True, stream=stream).standard_normal(dtype=np.float32, out=rows)
        drawn[side] = rows
    return drawn


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
@pytest.mark.parametrize(
    "strange",
    [
        lambda rows: rows.astype(np.float64),
        lambda rows: np.asfortranarray(rows),
        lambda rows: rows[:, :-1].copy(),
        lambda rows: rows.reshape(-1),
        lambda rows: rows.tolist(),
        lambda rows: 3,
    ],
    ids=["float64", "columns first", "narrow", "flat", "a list", "a number"],
)
@pytest.mark.parametrize("xp", [np, plain], ids=["kernels", "array code"])
def test_what_is_no_factor_is_drawn_anew(name, strange, xp):
    compressor = parse(f"{name}(rank=4)")
    state = {side: strange(rows) for side, rows in _started(compressor, 0).items()}
    outs = []
    for held in ({}, state):
        x, out = normal(1, *SHAPE).reshape(-1), np.empty(SHAPE[0] * SHAPE[1], np.float32)
        ctx = Context(shape=SHAPE, numel=x.size, state=held, step=4, xp=xp)
        rounds = compressor.exchange(x, out, ctx)
        asked = next(rounds)
        while True:
            try:
                asked = rounds.send(asked.values.copy())
            except StopIteration:
                break
        outs.append(out)
    np.testing.assert_array_equal(*outs)


# -- flat arrays of another tensor --------------------------------------------------------------

REMEMBERING = [
    "topk(ratio=0.1) | momentum_correction", "int8 | momentum_correction",
    "topk(ratio=0.1) | ef21", "int8 | ef21", "bf16 | ef", "threshold | ef", "powersgd | ef",
]  # fmt: skip


@pytest.mark.parametrize("spec", REMEMBERING)
@pytest.mark.parametrize("n", [100, 200_000])
def test_a_tensor_of_another_size_is_refused(spec, n):
    compressor, states = parse(spec), [{}, {}]
    step(compressor, states, 0, (40, 50))
    before = copy.deepcopy(states)
    with pytest.raises(CompressorError, match=r"'tensor' is float32\[2000\], not float32\["):
        step(compressor, states, 1, (n // 10, 10))
    for state in states:
        state.pop("sent", None)  # of a step that came to no end
    np.testing.assert_equal(states, before)
    step(compressor, states, 1, (40, 50))


@pytest.mark.parametrize("spec", REMEMBERING)
@pytest.mark.parametrize(
    "strange",
    [
        lambda a: a.astype(np.float64),
        lambda a: a.reshape(40, 50),
        lambda a: np.repeat(a, 2)[::2],
        lambda a: a.tolist(),
    ],
    ids=["float64", "a matrix", "gaps", "a list"],
)
def test_what_is_no_flat_array_is_refused(spec, strange):
    compressor, states = parse(spec), [{}, {}]
    step(compressor, states, 0, (40, 50))
    for state in states:
        for key, value in state.items():
            if isinstance(value, np.ndarray) and value.shape == (2000,):
                state[key] = strange(value)
    with pytest.raises(CompressorError, match="another size needs another name"):
        step(compressor, states, 1, (40, 50))


def test_a_piece_beyond_the_tensor_is_refused():
    x = normal(0, 64)
    for spec in ("int8 | ef", "int8 | ef21", "int8 | momentum_correction"):
        ctx = Context(shape=(100,), numel=100, offset=64)
        with pytest.raises(CompressorError, match="lie beyond its 100"):
            encode(parse(spec), x, ctx)


# -- lengths that kernels are given -------------------------------------------------------------


def _payload_specs():
    found = []
    for name in names():
        compressor = parse(name)
        if compressor.is_bound() and compressor.traits().combine != "rounds":
            found.append(name)
    return [*found, "topk | int8", "topk | lossless", "int4 | hadamard", "block_topk(bits=2)"]


@pytest.mark.parametrize("spec", [s for s in _payload_specs() if s != "none"])
@pytest.mark.parametrize("n", [1, 3000])
def test_payloads_of_another_length_are_refused(spec, n):
    """A decoder that read on behind the end would show what lies there, or end the process."""
    compressor, x = parse(spec), normal(1, n)
    payload, out = encode(compressor, x, context(x)), np.empty(n, np.float32)
    for name, array in payload.items():
        changes = [array[:-1], np.concatenate([array, array[:1]])] if array.size else []
        for changed in [*changes, array.astype(np.float64)]:
            for decode in (compressor.decompress, compressor.accumulate):
                with pytest.raises(PayloadError):
                    decode(payload | {name: changed}, out, context(x))
        with pytest.raises(PayloadError):
            compressor.decompress({k: v for k, v in payload.items() if k != name}, out, context(x))


@pytest.mark.parametrize("spec", [s for s in _payload_specs() if s != "none"])
def test_arrays_to_encode_into_are_looked_at(spec):
    compressor, x = parse(spec), normal(1, 3000)
    if not compressor.traits().fixed_size:
        with pytest.raises(CompressorError):
            compressor.compress_feedback(x, np.zeros(2999, np.float32), 1.0, context(x))
        return
    payload = empty_payload(compressor, x.size, context(x))
    with pytest.raises(CompressorError):
        compressor.feedback_into(x, np.zeros(2999, np.float32), 1.0, payload, context(x))
    for name, array in payload.items():
        short = payload | {name: array[:-1]}
        with pytest.raises(CompressorError):
            compressor.encode_into(x, short, context(x))
        with pytest.raises(CompressorError):
            compressor.feedback_into(x, np.zeros(3000, np.float32), 1.0, short, context(x))


@pytest.mark.parametrize("xp", [np, plain], ids=["kernels", "array code"])
def test_factors_are_looked_at(xp):
    ctx, matrix = Context(xp=xp), normal(0, 30, 20)
    left, right, out = normal(1, 3, 30), normal(2, 3, 20), np.empty((30, 20), np.float32)
    poison, wrong = np.float32(0), normal(3, 3, 19)
    source = Source(matrix, ctx)
    calls = [
        lambda: source.times_rows(wrong, np.empty((3, 30), np.float32)),
        lambda: source.times_rows(right, np.empty((2, 30), np.float32)),
        lambda: source.times_columns(wrong, np.empty((3, 20), np.float32)),
        lambda: source.times_columns(left, np.empty((4, 20), np.float32)),
        lambda: product((left, wrong), poison, out, ctx),
        lambda: product((left[:2], right), poison, out, ctx),
        lambda: keep(right, poison, right[:2].copy(), ctx),
        lambda: orthonormal(right, wrong, ctx),
        lambda: orthonormal(right.T.copy(), np.empty((20, 3), np.float32), ctx),
        lambda: Source(matrix, ctx, matrix[1:], 1.0, matrix),
    ]
    if xp is np:
        both, held = (left, right), matrix[1:].copy()
        calls += [
            lambda: product_and_lost(both, (left, wrong), poison, matrix, out, matrix, ctx),
            lambda: product_and_lost(both, both, poison, matrix, out, held, ctx),
        ]
    for call in calls:
        with pytest.raises(CompressorError):
            call()


class NoDevice:
    """A device on which nothing must be launched."""

    def address(self, array):
        return array.ctypes.data

    def launch(self, program, kernel, blocks, table):
        raise AssertionError(f"{kernel} was launched")


def test_launches_look_at_lengths():
    device, scratch = NoDevice(), Workspace().array
    x, short = np.ones(64, np.float32), np.ones(63, np.float32)
    one, indices = np.ones(1, np.float32), np.arange(8, dtype=np.uint32)
    rows, fewer = np.ones((2, 8), np.float32), np.ones((1, 8), np.float32)
    codec, part = parse("int8").cuda(), [np.empty(64, np.uint8), np.empty(1, np.uint16)]
    code = cuda_shared.program(8, 64, False)
    calls = [
        lambda: elementwise.run(device, "add", x, a=x, b=short),
        lambda: elementwise.run(device, "keep_combined", x, a=x, b=x, c=short),
        lambda: elementwise.run(device, "scatter", x, a=x, indices=indices),
        lambda: state_updates.run(device, "differ", [Operands(x, other=short, out=x)]),
        lambda: state_updates.run(device, "commit", [Operands(x, kept=x, other=short, out=x)]),
        lambda: state_updates.run(device, "advance", [Operands(x, kept=x, out=x, bound=x)]),
        lambda: state_updates.run(device, "settle", [Operands(x, kept=short, other=x)]),
        lambda: codec.encode(device, [bucketed.Target(x, 64, part, short)]),
        lambda: codec.encode(device, [bucketed.Target(short, 64, part)]),
        lambda: hadamard.run(device, "rotate", x, short, 64, 1, 0),
        lambda: randomk.encode(device, x, short, 1.0, 1.0, one, 1, (8, 8), scratch),
        lambda: cuda_shared.run(device, code, "decode", 64, one, codes=x, out=short),
        lambda: cuda_select.largest(
            device, [cuda_select.Selected(x, indices, one)], scratch
        ),
        lambda: cuda_select.largest(
            device, [cuda_select.Selected(x, indices, np.ones(8, np.float32), short)], scratch
        ),
        lambda: cuda_factors.keep(device, [cuda_factors.Rows(rows, fewer)]),
        lambda: cuda_products.product(device, rows, fewer, one, np.ones((8, 8), np.float32)),
        lambda: cuda_products.product(
            device, rows, rows, one, np.ones((8, 8), np.float32), own_left=rows, own_right=rows,
            target=np.ones((8, 8), np.float32), residual=np.ones((7, 8), np.float32),
        ),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CompressorError):
            call()
