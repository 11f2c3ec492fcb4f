"""What compressors remember after an exchange that failed on all ranks: nothing of it."""

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import CompressionFailed, Request
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.ring import ReduceOp

N, STEPS = 3000, 30


def constant(rank):
    return np.random.default_rng(rank).standard_normal(N).astype(np.float32)


def trained(size, spec, op):
    """Return the last result, what is remembered, and how many steps failed, by rank."""

    def body(engine):
        states, failed = [{}], 0
        request = Request("w", shape=(N,), spec=spec, op=op, collective="scatter_reduce")
        group = engine.declare("g", [request], [parse(spec)], states)
        while states[0].get("step", 0) < STEPS:
            result = constant(engine.rank)
            group.submit("w", result)
            try:
                group.wait(60)
            except CompressionFailed:
                failed += 1
        return result, states[0], failed

    return with_engines(size, body)


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM])
@pytest.mark.parametrize("spec", ["int4 | ef21", "int8 | hadamard(block=64) | ef21"])
@pytest.mark.parametrize("size", [3, 4])
def test_ef21_goes_on_as_if_an_exchange_had_not_failed(size, spec, op, monkeypatch):
    undisturbed = trained(size, spec, op)
    decode, left = BucketCodec.decode_into, [2, 5]

    def failing(codec, part, payload):
        if codec.members[0].rank == size - 1 and codec.members[0].step in left:
            left.remove(codec.members[0].step)
            raise RuntimeError("it failed once")
        decode(codec, part, payload)

    monkeypatch.setattr(BucketCodec, "decode_into", failing)
    exact = sum(constant(rank).astype(np.float64) for rank in range(size))
    exact /= size if op is ReduceOp.AVERAGE else 1
    for (result, state, failed), (wanted, known, _) in zip(
        trained(size, spec, op), undisturbed, strict=True
    ):
        assert failed == 2
        assert np.linalg.norm(result - exact) < 1e-6 * np.linalg.norm(exact)
        np.testing.assert_array_equal(result, wanted)
        np.testing.assert_equal(state, known)
