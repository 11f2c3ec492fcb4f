"""A codec allocates nothing after the first step but the arrays of a payload of variable size."""

import functools
import gc
import tracemalloc

import numpy as np
import pytest

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.core.context import SECOND_STAGE

N = 1 << 18  # elements: 1 MiB
# Python's own objects: closures, views of arrays, contexts. A buffer of a bucket each is far more.
FEW = 16 << 10

FIXED = [
    "none", "fp16", "bf16", "fp8", "fp8(format='e5m2', block=64)", "int8", "int4",
    "int8(stochastic=True)", "minmax", "minmax(bits=3, stochastic=True)", "qsgd", "natural",
    "terngrad", "onebit", "signsgd", "topk", "topk(ratio=0.3)", "block_topk",
    "block_topk(bits=2)", "block_topk(ratio=0.25, block=64, dct=True)", "randomk",
    "randomk(unbiased=False)", "topk | int8", "topk | topk | int8", "block_topk | int4",
    "int8 | hadamard", "qsgd(bits=4) | scaled", "int8 | min_size(10)",
]  # fmt: skip
REMEMBERING = [
    *(f"{spec} | ef" for spec in FIXED if not parse(spec).divergence()),
    "int8 | server_ef", "int8 | hadamard | ef(decay=0.9)", "topk | momentum_correction(clip=1.0)",
    "int8 | ef21", "topk | int8 | ef21", "fp8 | momentum_correction(masking=False)",
]  # fmt: skip
VARIABLE = [
    "threshold(value=2.5)", "topk_sampled", "sidco", "lossless", "threshold(value=2.5) | int8",
]  # fmt: skip
ROUNDS = [
    "powersgd", "powersgd | ef", "powersgd(warm_start=False) | ef", "acpsgd", "acpsgd | ef",
    "shared_int", "shared_int(stochastic=True) | ef", "shared_int | hadamard | ef",
    "terngrad_shared", "terngrad_shared | ef",
]  # fmt: skip


@functools.cache
def gradient(step):
    return np.random.default_rng(step).standard_normal(N, dtype=np.float32)


def peaks(run, warm=3, steps=2):
    """Return the bytes by which memory rose at most during each step after some."""
    inputs = [gradient(step) for step in range(warm + steps)]
    for step in range(warm):
        run(step, inputs[step])
    found = []
    gc.disable()
    tracemalloc.start()
    try:
        for step in range(warm, warm + steps):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            run(step, inputs[step])
            found.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        gc.enable()
    return found


def context(state, workspace, step, stage=1):
    side = int(N**0.5)
    return Context(
        shape=(side, side), numel=N, state=state, step=step, workspace=workspace, stage=stage
    )


STAGES = [(spec, 1) for spec in FIXED + REMEMBERING]
STAGES += [(spec, 2) for spec in FIXED + REMEMBERING if parse(spec).traits().stateful]


@pytest.mark.parametrize(("spec", "stage"), STAGES)
def test_steps_with_payloads_of_fixed_size_allocate_nothing(spec, stage):
    compressor, whole, workspace = parse(spec), {}, Workspace()
    payload, out = empty_payload(compressor, N, Context()), np.empty(N, np.float32)
    state = whole if stage == 1 else whole.setdefault(f"{SECOND_STAGE}0", {})

    def step(number, x):
        ctx = context(state, workspace, number, stage)
        compressor.encode_into(x, payload, ctx)
        compressor.decompress(payload, out, ctx)
        compressor.accumulate(payload, out, ctx)
        compressor.sum_into([payload, payload], out, ctx)
        compressor.finish(out, context(whole, workspace, number))

    assert max(peaks(step)) < FEW


@pytest.mark.parametrize("spec", VARIABLE + [f"{spec} | ef" for spec in VARIABLE])
def test_payloads_of_variable_size_are_all_that_is_allocated(spec):
    compressor, state, workspace = parse(spec), {}, Workspace()
    out, sizes = np.empty(N, np.float32), []

    def step(number, x):
        ctx = context(state, workspace, number)
        payload = compressor.compress(x, ctx)
        compressor.decompress(payload, out, ctx)
        compressor.accumulate(payload, out, ctx)
        sizes.append(sum(array.nbytes for array in payload.values()))

    for peak, size in zip(peaks(step, steps=3), sizes[3:], strict=True):
        # Counts vary: scratch may grow with the largest, and ranges' pieces are put together.
        assert peak < 3.5 * size + FEW
        assert peak < 1.6 * 4 * N


@pytest.mark.parametrize("spec", ROUNDS)
def test_rounds_allocate_nothing(spec):
    compressor, state, workspace = parse(spec), {}, Workspace()
    out, received = np.empty(N, np.float32), {}

    def step(number, x):
        generator = compressor.exchange(x, out, context(state, workspace, number))
        try:
            asked, count = next(generator), 0
            while True:
                key = (number % 2, count)  # acpsgd sends another factor in every other step
                if key not in received:
                    received[key] = np.empty_like(asked.values)
                received[key][...] = asked.values
                asked, count = generator.send(received[key]), count + 1
        except StopIteration:
            pass

    assert max(peaks(step, warm=4)) < FEW


def test_the_measure_sees_what_is_allocated():
    kept = []
    assert max(peaks(lambda number, x: kept.append(x * 2))) > 4 * N
