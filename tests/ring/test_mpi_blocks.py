"""Collectives in blocks, over messages that stay in this process, against NumPy."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlet.ring.rank_order import Scratch
from ringlet.ring.transports import mpi_blocks
from ringlet.ring.transports.mpi_blocks import Blocks

Array = npt.NDArray[Any]
MPI = SimpleNamespace(BYTE="byte")


class Network:
    """Messages between ``size`` ranks, in order, as MPI promises for two of them."""

    def __init__(self, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self.sent: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.asked: defaultdict[tuple[int, int], int] = defaultdict(int)


class Rank:
    """What mpi4py calls a communicator."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.network.size

    def Isend(self, what: tuple[Array, int, str], rank: int) -> SimpleNamespace:
        array, nbytes, kind = what
        assert array.flags.c_contiguous
        assert (array.nbytes, kind) == (nbytes, MPI.BYTE)
        assert 0 < nbytes <= mpi_blocks.BLOCK
        with self.network.lock:
            self.network.sent[self.rank, rank].append(array.tobytes())
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, what: tuple[Array, int, str], rank: int) -> SimpleNamespace:
        array, nbytes, _ = what
        way = rank, self.rank
        with self.network.lock:
            place = self.network.asked[way]
            self.network.asked[way] += 1

        def test() -> bool:
            with self.network.lock:
                if len(self.network.sent[way]) <= place:
                    return False
                message = self.network.sent[way][place]
            assert len(message) == nbytes
            array.view(np.uint8)[:] = np.frombuffer(message, np.uint8)
            return True

        return SimpleNamespace(Test=test)


def on_ranks(size: int, function: Callable[[int, Blocks], Array]) -> list[Array]:
    """Return what ``function`` returns on each rank; every message was received."""
    network = Network(size)
    with ThreadPoolExecutor(size) as pool:
        blocks = [Blocks(MPI, Rank(network, rank)) for rank in range(size)]
        found = list(pool.map(function, range(size), blocks))
    assert {way: len(sent) for way, sent in network.sent.items() if sent} == {
        way: asked for way, asked in network.asked.items() if asked
    }
    return found


@pytest.fixture(autouse=True, scope="module")
def _short_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_blocks, "BLOCK", 64)
        yield


dtypes = st.sampled_from([np.uint8, np.int64, np.float32])
sizes = st.integers(2, 5)


def drawn(dtype: Any, n: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 50, n).astype(dtype)


@given(st.data(), sizes, dtypes)
def test_every_piece_arrives_where_it_belongs(data: st.DataObject, size: int, dtype: Any) -> None:
    row = st.lists(st.integers(0, 70), min_size=size, max_size=size)
    counts = data.draw(st.lists(row, min_size=size, max_size=size))
    sends = [drawn(dtype, sum(each), seed) for seed, each in enumerate(counts)]
    pieces = [np.split(x, np.cumsum(each)[:-1]) for x, each in zip(sends, counts, strict=True)]

    def run(rank: int, blocks: Blocks) -> Array:
        incoming = [each[rank] for each in counts]
        receive = np.full(sum(incoming), 77, dtype)
        blocks.alltoall(sends[rank], receive, counts[rank], incoming)
        return receive

    for rank, found in enumerate(on_ranks(size, run)):
        assert np.array_equal(found, np.concatenate([each[rank] for each in pieces]))


@given(st.data(), sizes, dtypes)
def test_all_have_what_each_has_sent(data: st.DataObject, size: int, dtype: Any) -> None:
    counts = data.draw(st.lists(st.integers(0, 70), min_size=size, max_size=size))
    sends = [drawn(dtype, n, seed) for seed, n in enumerate(counts)]

    def run(rank: int, blocks: Blocks) -> Array:
        receive = np.full(sum(counts), 77, dtype)
        blocks.ring_allgather(sends[rank], receive, counts)
        return receive

    for found in on_ranks(size, run):
        assert np.array_equal(found, np.concatenate(sends))


@given(sizes, dtypes, st.integers(5, 300))
def test_sums_are_those_of_all_ranks(size: int, dtype: Any, n: int) -> None:
    inputs = [drawn(dtype, n, seed) for seed in range(size)]

    def run(rank: int, blocks: Blocks) -> Array:
        buffer = inputs[rank].copy()
        blocks.ring_allreduce(buffer, np.add, Scratch())
        return buffer

    for found in on_ranks(size, run):
        assert np.array_equal(found, np.sum(inputs, axis=0, dtype=dtype))
