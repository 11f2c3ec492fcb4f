"""Compressed allreduces without seals: the sums of those with seals, and lengths that lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import ProtocolError, RingError
from ringlet.ring.collectives import compressed, compressed_gpu
from ringlet.ring.rank_order import even_counts
from ringlet.ring.transports.local import run_local


class Halves:
    """Values (float32) of one rank, which travel as float16."""

    def __init__(self, rank, n, parts, short=()):
        self.parts, self.counts = parts, even_counts(n, parts)
        whole = np.random.default_rng([n, rank]).normal(size=n).astype(np.float32)
        ends = np.cumsum(self.counts)[:-1]
        self.values, self.out = np.split(whole, ends), np.split(np.zeros(n, np.float32), ends)
        self.short = short  # stages that tell of fewer bytes than they have

    def prepare(self):
        pass

    def capacity(self, part):
        return 2 * self.counts[part]

    def encode_into(self, part, out, values=None, stage=1):
        nbytes = self.capacity(part)
        halves = (self.values[part] if values is None else values).astype(np.float16)
        out[:nbytes] = halves.view(np.uint8)
        return nbytes - 2 * (stage in self.short)

    def _sum(self, payloads):
        return np.sum([p.view(np.float16).astype(np.float32) for p in payloads], axis=0)

    def decode_sum_into(self, part, payloads):
        self.out[part][:] = self._sum(payloads)

    def decode_sum_encode(self, part, payloads, out):
        return self.encode_into(part, out, self._sum(payloads), stage=2)

    def decode_into(self, part, payload):
        self.out[part][:] = payload.view(np.float16)


def bytes_of(n):
    return np.empty(n, np.uint8)


def reduced(comm, n, scattered, sealed, short=()):
    """Return this rank's result, and the bytes it sent."""
    codec = Halves(comm.rank, n, comm.size if scattered else 1, short)
    if sealed:
        encoded = compressed.encode(codec)
        sizes = [encoded.nbytes] * comm.size
        if scattered:
            compressed.scatter_reduce(comm, codec, encoded)
        else:
            compressed.allgather_reduce(comm, codec, encoded, sizes)
        return np.concatenate(codec.out), 0.0
    encoded = compressed.encode(codec, room=0)
    if scattered:
        steps = compressed_gpu.scatter_reduce(comm, codec, encoded, bytes_of)
    else:
        sizes = [2 * n] * comm.size
        steps = compressed_gpu.allgather_reduce(comm, codec, encoded, sizes, bytes_of)
    sent = 0.0
    for wire in steps:
        wire.call()
        sent += wire.nbytes
    return np.concatenate(codec.out), sent


@given(size=st.integers(1, 4), n=st.integers(0, 500), scattered=st.booleans())
@settings(max_examples=30)
def test_results_are_those_with_seals(size, n, scattered):
    found = run_local(lambda comm: reduced(comm, n, scattered, sealed=False), size)
    sealed = run_local(lambda comm: reduced(comm, n, scattered, sealed=True), size)
    for (out, _), (expected, _) in zip(found, sealed, strict=True):
        np.testing.assert_array_equal(out, expected)
    whole = 2 * n * (size - 1)
    assert sum(sent for _, sent in found) == (2 * whole if scattered else size * whole)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_length_that_lies_is_an_error_before_anything_moves(scattered):
    def body(comm):
        with pytest.raises(ProtocolError, match="bytes"):
            reduced(comm, 90, scattered, sealed=False, short=(1,))
        comm.barrier()

    run_local(body, 3)


def test_a_sum_of_another_length_is_an_error_on_the_way():
    def body(comm):
        reduced(comm, 90, True, sealed=False, short=(2,) if comm.rank == 1 else ())

    with pytest.raises(ProtocolError, match="the sum of part 1 has 58 bytes, its fixed size is 60"):
        run_local(body, 3)
    assert issubclass(ProtocolError, RingError)
