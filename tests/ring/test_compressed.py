"""Compressed collectives with a small codec: int8 with one scale per part."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import ProtocolError
from ringlet.ring.compressed import allgather_reduce, encode, scatter_reduce
from ringlet.ring.halves import even_counts
from ringlet.ring.local import run_local


class Int8Codec:
    """Values (float32) of one rank in ``parts`` parts; a payload is a scale and int8 steps."""

    def __init__(self, values, parts, shorten=False):
        ends = np.cumsum(even_counts(values.size, parts))
        self.parts = parts
        self.values = np.split(values, ends[:-1])
        self.output = np.full(values.size, np.nan, np.float32)
        self.outputs = np.split(self.output, ends[:-1])
        self.shorten = shorten

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
        others = sum(4 + counts[r] for r in range(size) if r != rank)
        expected = others + (size - 1) * (4 + counts[rank]) if scatter else (size - 1) * (4 + n)
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
        assert encoded.nbytes == encoded.buffer.size == comm.rank
        sizes = [int.from_bytes(b) for b in comm.allgather_bytes(encoded.nbytes.to_bytes(4))]
        return codec.output, allgather_reduce(comm, codec, encoded, sizes)

    for rank, (output, sent) in enumerate(run_local(ragged, 4)):
        assert output[0] == 3210
        assert sent == 3 * rank


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
