"""A batch that fails, and what its tensors do next: the same names are handed in again at once."""

import threading

import numpy as np
import pytest
from engines import on_hosts, with_engines

from ringlet.compressors import Compressor, Context, parse
from ringlet.fusion import CompressionFailed, Engine, Limits, Request
from ringlet.fusion.negotiation import messages as m
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

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


def name_of(found):
    return found.owner.buckets[found.bucket].members[0].name


@pytest.mark.parametrize("spec", ["lossless", "int8", "fp16", "topk(ratio=0.5)"])
def test_a_tensor_that_was_done_is_reduced_again_while_its_batch_fails(spec):
    def body(engine):
        tensors = {"early": parse(spec), "late": Moody()}
        for handle in submit(engine, tensors):
            handle.wait(WAIT)
        right = submit(engine, {"early": tensors["early"]})[0].wait(WAIT).copy()
        if engine.rank == 0:
            Moody.bad.set()
        handles, again = [], []

        def may(waiting):
            if not handles:
                return False
            early, late = handles
            if not early.done():
                return name_of(waiting.first()) == "early"
            # Both batches are at hand, or one failed, or the other needed no vote.
            return len(waiting) == 2 or late.done() or any(each.done() for each in again)

        encode_when(engine, may)
        handles += submit(engine, tensors)
        early, late = handles
        early.wait(WAIT)
        again += submit(engine, {"early": tensors["early"]})
        with pytest.raises(CompressionFailed, match="moody"):
            late.wait(WAIT)
        np.testing.assert_array_equal(again[0].wait(WAIT), right)
        return float(right[0])

    assert with_engines(2, body, fusion_threshold=1) == [pytest.approx(2, rel=0.01)] * 2


def test_buckets_of_a_run_that_failed_are_not_encoded_for_the_next():
    """The plan is the same, and so are the indices: a bucket would be voted on twice."""
    tensors = {"a": Moody(), "b": Moody()}

    def body(engine):
        for _ in range(3):  # by number from the second time on
            for handle in submit(engine, tensors):
                handle.wait(WAIT)
        if engine.rank == 0:
            Moody.bad.set()
        states, failed, again, encoded = engine.states, [], [], []

        def may(waiting):
            first = waiting.first()
            if not failed or not failed[0].done():
                # Rank 0 finds the fault in the first bucket; rank 1 has not begun yet.
                going = bool(failed) and engine.rank == 0 and len(waiting) == 2
            else:
                left = 1 if engine.rank == 0 else 2  # of the run that failed
                going = bool(encoded) or len(waiting) == left + 2
            if going and failed and failed[0].done():
                encoded.append(name_of(first))
            return going

        encode_when(engine, may)
        failed += submit(engine, tensors)
        for handle in failed:
            with pytest.raises(CompressionFailed, match="moody"):
                handle.wait(WAIT)
        if engine.rank == 0:
            Moody.bad.clear()
        again += submit(engine, tensors)
        for handle in again:
            assert (handle.wait(WAIT) == 2).all()
        assert len(encoded) == (3 if engine.rank == 0 else 4)  # what is stale was looked at
        for handle in submit(engine, tensors):
            handle.wait(WAIT)
        return {name: state["step"] for name, state in states.items()}

    assert with_engines(2, body, fusion_threshold=1) == [{"a": 5, "b": 5}] * 2


def test_a_rank_that_fails_its_last_step_and_leaves_is_heard_by_one_that_encodes_late():
    begun, left = threading.Event(), threading.Event()

    def rank_main(comm):
        engine = Engine(comm, open_control, Limits())
        encode = engine._worker.encode_next
        if engine.rank:
            engine._worker.encode_next = lambda: (begun.set(), left.wait(WAIT), encode())
        else:
            engine._worker.encode_next = lambda: (begun.wait(WAIT), encode())
            Moody.bad.set()
        try:
            with pytest.raises(CompressionFailed, match=r"rank 0: .*moody"):
                submit(engine, {"w": Moody()})[0].wait(WAIT)
        finally:
            engine.shutdown()
            left.set()

    run_local(rank_main, 2)


def test_nothing_is_left_of_batches_that_failed():
    def body(engine):
        Moody.bad.set()
        for _ in range(10):
            with pytest.raises(CompressionFailed, match="moody"):
                submit(engine, {"a": Moody()})[0].wait(WAIT)
        # A rank tells that it has heard of a failure before it asks for anything else.
        engine.submit(Request("b", "barrier"), np.empty(0, np.float32), at_once=True).wait(WAIT)
        votes = engine._coordinator._votes if engine.rank == 0 else None
        return votes and (len(votes._of), len(votes._released))

    assert with_engines(2, body)[0] == (0, 0)


KNOWN = [  # what ranks do not vote on: gathered, reduced shard by shard, and over two levels
    *(("ab", spec) for spec in ("int8 | ef", "topk(ratio=0.25) | ef", "onebit | ef")),
    *(("abc", spec) for spec in ("int8 | ef", "topk(ratio=0.25) | ef")),
    *(("aabb", spec) for spec in ("int8 | ef", "lossless | ef")),
]


def spoil(engine, name):
    """Let what is remembered of a tensor fit no tensor, as a state of another model's would."""
    state = engine.states[name]
    whole = dict(state)
    state["residual"] = np.ones(3, np.float32)
    return whole


@pytest.mark.parametrize("n", [N, 70_000])
@pytest.mark.parametrize(("hosts", "spec"), KNOWN)
def test_what_one_rank_cannot_encode_fails_on_all_where_nobody_votes(hosts, spec, n):
    compressor, levels = parse(spec), len(set(hosts)) < len(hosts)
    compressor.warm_up(Context())

    def body(engine):
        def reduced(value):
            asked = Request("w", shape=(n,), spec=spec, op=ReduceOp.SUM)
            plain = Request("plain", shape=(n,), op=ReduceOp.SUM)
            items = [(asked, np.full(n, value, np.float32), None, compressor)]
            items += [(plain, np.full(n, value, np.float32), None, None)]
            return engine.submit_all(items, at_once=True)

        for _ in range(3):
            for handle in reduced(1):
                assert handle.wait(WAIT)[0] == pytest.approx(len(hosts), rel=0.02) or "topk" in spec
        whole = spoil(engine, "w") if engine.rank == 1 else None
        texts = []
        for _ in range(2):  # the second time by number
            failing, plain = reduced(1)
            assert (plain.wait(WAIT) == len(hosts)).all()
            with pytest.raises(CompressionFailed) as caught:
                failing.wait(WAIT)
            texts.append(str(caught.value))
        if whole is not None:
            engine.states["w"].clear()
            engine.states["w"].update(whole)
        again, plain = reduced(2)
        assert (plain.wait(WAIT) == 2 * len(hosts)).all()
        return texts, again.wait(WAIT).tobytes()

    runner = on_hosts if levels else lambda hosts, body: with_engines(len(hosts), body)
    found = runner(hosts, body)
    assert len({replica for _, replica in found}) == 1
    ((first, second),) = {tuple(texts) for texts, _ in found}
    assert first == second
    assert "rank 1: " in first
    assert "'w'" in first


@pytest.mark.parametrize(("spec", "votes"), [
    ("none", 0), ("fp16", 0), ("int8 | ef", 0), ("topk(ratio=0.5) | ef", 0), ("lossless", 1),
    ("randomk(ratio=0.5, unbiased=False) | ef", 1), ("powersgd | ef", 1), ("shared_int", 1),
    ("powersgd | shared_int | ef", 5), ("plugin", 1),
])  # fmt: skip
def test_ranks_vote_on_what_they_cannot_know_of_each_other(spec, votes):
    compressor = Moody() if spec == "plugin" else parse(spec)
    compressor.warm_up(Context())

    def body(engine):
        sent, send = [], engine._control.send
        engine._control.send = lambda message: (sent.append(message[:1]), send(message))
        for _ in range(3):
            asked = Request("w", shape=(40, 50), spec=str(compressor), op=ReduceOp.SUM)
            engine.submit(asked, np.ones(N, np.float32), None, compressor, at_once=True).wait(WAIT)
        return sent.count(m.VOTE)

    assert with_engines(2, body) == [3 * votes] * 2
