"""A batch that fails, and what its tensors do next: the same names are handed in again at once."""

import threading

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import Compressor, parse
from ringlet.fusion import CompressionFailed, Request
from ringlet.ring.communicator import ReduceOp

N, WAIT = 2000, 20


class Moody(Compressor):
    """Sends values as they are, and fails on rank 0 while ``bad`` is set."""

    bad = threading.Event()

    def compress(self, x, ctx):
        if self.bad.is_set() and ctx.rank == 0:
            raise RuntimeError("moody")
        return {"values": x.copy()}

    def decompress(self, payload, out, ctx):
        out[...] = payload["values"]


@pytest.fixture(autouse=True)
def good():
    Moody.bad.clear()
    yield
    Moody.bad.clear()


def request(name, compressor):
    return Request(name, shape=(N,), spec=str(compressor), op=ReduceOp.SUM)


def submit(engine, tensors):
    """Submit {name: compressor}, ones each."""
    items = [(request(n, c), np.ones(N, np.float32), None, c) for n, c in tensors.items()]
    return engine.submit_all(items, at_once=True)


def encode_when(engine, may):
    """Let the engine encode a bucket only where ``may(buckets that wait)`` says so."""
    worker = engine._worker
    encode = worker.encode_next

    def encode_next():
        if may(worker.complete):
            encode()

    worker.encode_next = encode_next


@pytest.mark.parametrize("spec", ["lossless", "int8", "fp16", "topk(ratio=0.5)"])
def test_a_tensor_that_was_done_is_reduced_again_while_its_batch_fails(spec):
    def body(engine):
        tensors = {"early": parse(spec), "late": Moody()}
        for handle in submit(engine, tensors):
            handle.wait(WAIT)
        right = submit(engine, {"early": tensors["early"]})[0].wait(WAIT).copy()
        if engine.rank == 0:
            Moody.bad.set()
        handles = []

        def may(waiting):
            if not handles:
                return False
            early, late = handles
            if not early.done():
                return waiting[0][0].buckets[waiting[0][1]].members[0].name == "early"
            return len(waiting) == 2 or late.done()  # both batches are at hand, or one failed

        encode_when(engine, may)
        handles += submit(engine, tensors)
        early, late = handles
        early.wait(WAIT)
        (again,) = submit(engine, {"early": tensors["early"]})
        with pytest.raises(CompressionFailed, match="moody"):
            late.wait(WAIT)
        np.testing.assert_array_equal(again.wait(WAIT), right)
        return float(right[0])

    assert with_engines(2, body, fusion_threshold=1) == [pytest.approx(2, rel=0.01)] * 2
