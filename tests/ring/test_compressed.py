"""Compressed collectives with a small codec: int8 with one scale per part."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import ExchangeFailed, ProtocolError
from ringlet.ring.collectives.compressed import (
    AllgatherReduce,
    ScatterReduce,
    allgather_reduce,
    blank,
    encode,
    scatter_reduce,
    steps,
)
from ringlet.ring.collectives.seal import SEAL, Fault, inspect, seal
from ringlet.ring.pipeline import Pipeline, PipelinedExchange
from ringlet.ring.rank_order import even_counts
from ringlet.ring.transports.local import run_local


class Int8Codec:
    """Values (float32) of one rank in ``parts`` parts; a payload is a scale and int8 steps."""

    def __init__(self, values, parts, shorten=False):
        ends = np.cumsum(even_counts(values.size, parts))
        self.parts = parts
        self.values = np.split(values, ends[:-1])
        self.output = np.full(values.size, np.nan, np.float32)
        self.outputs = np.split(self.output, ends[:-1])
        self.shorten = shorten

    def prepare(self):
        pass

    def capacity(self, part):
        return 4 + self.values[part].size

    def _encode(self, values, out):
        scale = np.float32(np.abs(values).max(initial=0) / 127)
        steps = np.rint(values / (scale or 1)).astype(np.int8)
        out[:4] = np.array([scale], np.float32).view(np.uint8)
        out[4 : 4 + values.size] = steps.view(np.uint8)
        return 4 + values.size - self.shorten

    def _decode(self, payload):
        return payload[4:].view(np.int8) * payload[:4].copy().view(np.float32)[0]

    def _sum(self, payloads):
        total = self._decode(payloads[0]).copy()
        for payload in payloads[1:]:
            total += self._decode(payload)
        return total

    def encode_into(self, part, out):
        return self._encode(self.values[part], out)

    def decode_sum_into(self, part, payloads):
        self.outputs[part][:] = self._sum(payloads)

    def decode_sum_encode(self, part, payloads, out):
        return self._encode(self._sum(payloads), out)

    def decode_into(self, part, payload):
        self.outputs[part][:] = self._decode(payload)


def gradient(rank, n, seed):
    return np.random.default_rng([seed, rank]).normal(size=n).astype(np.float32)


def run(comm, n, seed, scatter):
    codec = Int8Codec(gradient(comm.rank, n, seed), comm.size if scatter else 1)
    encoded = encode(codec)
    if scatter:
        sent = scatter_reduce(comm, codec, encoded)
    else:
        sent = allgather_reduce(comm, codec, encoded, [encoded.nbytes] * comm.size)
    return codec.output, sent


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(0, 300), st.integers(0, 99), st.booleans())
def test_replicas_are_bit_equal_and_close_to_the_sum(size, n, seed, scatter):
    results = run_local(run, size, n, seed, scatter)
    outputs = [output.tobytes() for output, _ in results]
    assert len(set(outputs)) == 1
    gradients = np.array([gradient(r, n, seed) for r in range(size)], np.float64)
    step = np.abs(gradients).max(initial=0) / 127
    bound = size * step / 2 * 1.001
    if scatter:  # the sum, at most ``size`` times the largest entry, is rounded once more
        bound += (np.abs(gradients.sum(0)).max(initial=0) + bound) / 254 * 1.001
    assert (np.abs(results[0][0] - gradients.sum(0)) <= bound + 1e-12).all()
    counts = even_counts(n, size)
    for rank, (_, sent) in enumerate(results):
        parts = [SEAL + 4 + counts[r] for r in range(size)]
        others = sum(parts) - parts[rank]
        every = others + (size - 1) * parts[rank]
        expected = every if scatter else (size - 1) * (SEAL + 4 + n)
        assert sent == expected


def test_payloads_of_different_sizes_are_gathered():
    class Ragged(Int8Codec):
        """Rank r sends r bytes, and the sum is of all bytes."""

        def capacity(self, part):
            return 8

        def encode_into(self, part, out):
            n = int(self.values[0][0])
            out[:n] = 1
            return n

        def decode_sum_into(self, part, payloads):
            self.output[:] = sum(int(p.sum()) * 10**i for i, p in enumerate(payloads))

    def ragged(comm):
        codec = Ragged(np.full(1, comm.rank, np.float32), 1)
        encoded = encode(codec)
        assert encoded.nbytes == encoded.buffer.size == comm.rank + SEAL
        sizes = [int.from_bytes(b) for b in comm.allgather_bytes(encoded.nbytes.to_bytes(4))]
        return codec.output, allgather_reduce(comm, codec, encoded, sizes)

    for rank, (output, sent) in enumerate(run_local(ragged, 4)):
        assert output[0] == 3210
        assert sent == 3 * (rank + SEAL)


def test_a_part_that_is_not_of_its_fixed_size_is_refused():
    def short(comm):
        codec = Int8Codec(gradient(comm.rank, 8, 0), comm.size, shorten=True)
        scatter_reduce(comm, codec, encode(codec))

    with pytest.raises(ProtocolError, match="fixed sizes"):
        run_local(short, 2)


def test_an_announcement_that_is_not_kept_is_refused():
    def wrong(comm):
        codec = Int8Codec(gradient(comm.rank, 8, 0), 1)
        allgather_reduce(comm, codec, encode(codec), [5] * comm.size)

    with pytest.raises(ProtocolError, match="announced 5"):
        run_local(wrong, 2)


def damaged(comm, method, damage, victim, calls=1):
    """Let ``damage`` have what ``comm`` receives from ``victim`` in the ``calls``-th call."""
    original = getattr(comm, method)
    seen = []

    def call(send, receive, *counts):
        original(send, receive, *counts)
        seen.append(1)
        if len(seen) == calls:
            sizes = counts[-1]
            start = sum(sizes[:victim])
            damage(receive[start : start + sizes[victim]])

    setattr(comm, method, call)


def flip(message):
    message[message.size // 3] ^= 4


def flip_number(message):
    message[-SEAL] ^= 1


def truncate(message):
    """What a receiver sees of a message that ended early: a shorter one, and what lay behind."""
    short = message[: message.size - 8].copy()
    seal(short, 1, 0)
    message[: short.size] = short
    message[short.size :] = message[short.size - 8 : short.size]
    seal_of = short[-SEAL:].copy()
    message[-SEAL:] = seal_of


def stale(message):
    seal(message, 0, 0)


def other_plan(message):
    seal(message, 1, 77)


@pytest.mark.parametrize(
    ("scatter", "method", "text"),
    [
        (True, "_alltoall", "rank 2 received from rank 1"),
        (True, "_allgather", "rank 2 received from rank 1"),
        (False, "_allgather", "rank 2 received from rank 1"),
    ],
)
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "damaged: its checksum"),
        (flip_number, "damaged: its checksum"),
        (truncate, "length"),
        (stale, "another exchange: its sequence"),
        (other_plan, "another plan: its plan hash"),
    ],
)
def test_a_wrong_payload_is_the_same_error_on_every_rank_and_no_output_is_touched(
    scatter, method, text, damage, what
):
    def faulty(comm):
        codec = Int8Codec(gradient(comm.rank, 60, 0), comm.size if scatter else 1)
        encoded = encode(codec)
        if comm.rank == 2:
            damaged(comm, method, damage, 1)
        arguments = [comm, codec, encoded] + [[encoded.nbytes] * comm.size] * (not scatter)
        with pytest.raises(ProtocolError) as caught:
            (scatter_reduce if scatter else allgather_reduce)(*arguments)
        assert np.isnan(codec.output).all()
        return str(caught.value), run(comm, 60, 0, scatter)[0].tobytes()

    results = run_local(faulty, 4)
    assert len(set(results)) == 1  # and the communicator still serves
    assert text in results[0][0]
    assert what in results[0][0]


@pytest.mark.parametrize("told", [len(Fault), 4 * len(Fault) + 1, -1, 2**63 - 1])
def test_a_finding_that_makes_no_sense_is_the_same_error_on_every_rank(told):
    def faulty(comm):
        codec = Int8Codec(gradient(comm.rank, 60, 0), 1)
        encoded = encode(codec)
        exchange = AllgatherReduce(comm, codec, encoded, [encoded.nbytes] * comm.size)
        exchange.start()
        exchange.reduce()
        if comm.rank == 2:
            exchange._inspector._finding = told
        with pytest.raises(ExchangeFailed) as caught:
            exchange.agree()
        return str(caught.value)

    assert set(run_local(faulty, 4)) == {"rank 2 told of no known fault (exchange 1)"}


def test_ranks_of_a_subset_are_named_by_their_first_rank():
    def faulty(comm):
        subset = comm.subset([1, 3])
        if subset is None:
            return
        codec = Int8Codec(gradient(comm.rank, 60, 0), 1)
        encoded = encode(codec)
        if comm.rank == 3:
            damaged(subset, "_allgather", flip, 0)
        with pytest.raises(ProtocolError, match="rank 3 received from rank 1"):
            allgather_reduce(subset, codec, encoded, [encoded.nbytes] * 2)

    run_local(faulty, 4)


def test_different_plans_are_noticed():
    def differ(comm):
        codec = Int8Codec(gradient(comm.rank, 60, 0), comm.size)
        with pytest.raises(ProtocolError, match="plan hash differs") as caught:
            scatter_reduce(comm, codec, encode(codec), plan=5 + (comm.rank == 1))
        return str(caught.value)

    assert len(set(run_local(differ, 3))) == 1


def test_a_codec_that_fails_to_sum_leaves_nobody_waiting():
    class Failing(Int8Codec):
        def decode_sum_encode(self, part, payloads, out):
            raise KeyError("boom")

    def failing(comm):
        kind = Failing if comm.rank == 1 else Int8Codec
        codec = kind(gradient(comm.rank, 60, 0), comm.size)
        with pytest.raises(ExchangeFailed) as caught:
            scatter_reduce(comm, codec, encode(codec))
        assert np.isnan(codec.output).all()
        assert isinstance(caught.value.__cause__, KeyError) == (comm.rank == 1)
        assert caught.value.witness == 1
        total = np.ones(3)
        comm.allreduce(total)  # which still works
        assert total.tolist() == [3, 3, 3]
        return str(caught.value)

    (text,) = set(run_local(failing, 3))
    assert text.startswith("rank 1 made of the payloads it received a sum that it could not encode")


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("failing", [{1}, {0, 2}, {0, 1, 2, 3}])
def test_who_comes_without_a_payload_is_named_and_nobody_takes_it_for_one(scatter, failing):
    class Watched(Int8Codec):
        sums = 0

        def _sum(self, payloads):
            self.sums += 1
            return super()._sum(payloads)

    def without(comm):
        fails = comm.rank in failing
        error = KeyError("boom") if fails else None
        codec = Watched(gradient(comm.rank, 60, 0), comm.size if scatter else 1)
        encoded, family = blank(codec) if fails else encode(codec), siblings(comm)
        if fails:  # what lay there before: a payload
            encoded.buffer[:] = encode(codec).buffer
        if scatter:
            exchange = ScatterReduce(comm, codec, encoded, siblings=family, failure=error)
        else:
            sizes = [encoded.nbytes] * comm.size
            exchange = AllgatherReduce(comm, codec, encoded, sizes, siblings=family, failure=error)
        with pytest.raises(ExchangeFailed) as caught:
            run_pipelined([exchange])
        assert caught.value.witness == min(failing)
        assert caught.value.__cause__ is error
        assert codec.sums == 0
        assert np.isnan(codec.output).all()
        return str(caught.value)

    (text,) = set(run_local(without, 4))
    assert text.startswith(f"rank {min(failing)} sent a message in place of one that it could not")


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=6),
    st.integers(0, 99),
)
def test_exchanges_in_a_pipeline_equal_those_one_by_one(size, shapes, seed):
    def both(comm):
        sequential = [run(comm, n, seed + i, scatter) for i, (n, scatter) in enumerate(shapes)]
        codecs, exchanges = [], []
        for i, (n, scatter) in enumerate(shapes):
            codecs.append(Int8Codec(gradient(comm.rank, n, seed + i), size if scatter else 1))
            encoded = encode(codecs[-1])
            if scatter:
                exchanges.append(ScatterReduce(comm, codecs[-1], encoded, siblings=siblings(comm)))
            else:
                sizes = [encoded.nbytes] * size
                exchanges.append(
                    AllgatherReduce(comm, codecs[-1], encoded, sizes, siblings=siblings(comm))
                )
        assert run_pipelined(exchanges) == sum(sent for _, sent in sequential)
        for codec, (output, _) in zip(codecs, sequential, strict=True):
            np.testing.assert_array_equal(codec.output, output)

    run_local(both, size)


def test_a_fault_in_a_pipeline_is_raised_on_every_rank():
    # Who leaves ends what others are in; of an engine's ranks the coordinator tells why before.
    raised = threading.Barrier(3)

    def faulty(comm):
        codecs = [Int8Codec(gradient(comm.rank, 60, i), comm.size) for i in range(5)]
        family = siblings(comm)
        exchanges = [ScatterReduce(comm, codec, encode(codec), siblings=family) for codec in codecs]
        if comm.rank == 0:
            damaged(comm, "_alltoall", flip, 1, calls=3)
        with pytest.raises(ProtocolError, match=r"rank 0 received from rank 1 .* \(exchange 3\)"):
            run_pipelined(exchanges)
        raised.wait(60)
        assert not np.isnan(codecs[0].output).any()
        for codec in codecs[2:]:  # whole, or not at all
            assert len(set(np.isnan(codec.output))) == 1
        assert comm.rank != 0 or np.isnan(codecs[2].output).all()

    run_local(faulty, 3)


def siblings(comm):
    found = [comm.sibling(1), comm.sibling(2)]
    return [sibling for sibling in found if sibling is not None]


def run_pipelined(exchanges, overlapping=True):
    """Run exchanges in a pipeline; return the bytes sent."""
    sent = []
    pipeline = Pipeline(lambda: None, depth=3)
    try:
        for exchange in exchanges:
            pipeline.add(
                PipelinedExchange(
                    steps(exchange), lambda: None, lambda _, __, nbytes, ___: sent.append(nbytes)
                ),
                overlapping,
            )
        pipeline.drain()
    finally:
        pipeline.stop(lambda: None)
    return sum(sent)


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.data())
def test_a_seal_accepts_its_message_and_no_other(payload, sequence, plan, data):
    message = np.frombuffer(payload + bytes(SEAL), np.uint8).copy()
    seal(message, sequence, plan)
    assert inspect(message, sequence, plan) == Fault.NONE
    assert inspect(message, sequence ^ 1, plan) == Fault.SEQUENCE
    assert inspect(message, sequence, plan ^ 1) == Fault.PLAN
    assert inspect(message[: SEAL - 1], sequence, plan) == Fault.LENGTH
    bit = data.draw(st.integers(0, 8 * message.size - 1))
    message[bit // 8] ^= 1 << bit % 8
    assert inspect(message, sequence, plan) in (Fault.CHECKSUM, Fault.LENGTH)
