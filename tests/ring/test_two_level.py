"""The compressed exchange over two levels: its results, and what is left when a codec fails."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import PeerLost, ProtocolError, ReduceOp, Topology
from ringlet.ring.collectives.reduce import allreduce_steps
from ringlet.ring.collectives.seal import SEAL
from ringlet.ring.collectives.two_level import HostShard, run, two_level
from ringlet.ring.pipeline import Pipeline, PipelinedExchange
from ringlet.ring.rank_order import even_counts
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.local import run_local

HELPERS = runpy.run_path(str(Path(__file__).with_name("test_compressed.py")))
Int8Codec, gradient, flip = HELPERS["Int8Codec"], HELPERS["gradient"], HELPERS["flip"]
damaged = HELPERS["damaged"]


def two_levels(comm, hosts):
    return HierarchicalCommunicator(comm, Topology.from_hosts(comm.rank, hosts))


def shard_of(two, counts, scatter, codec=Int8Codec):
    values = np.full(counts[two.local.rank], np.nan, np.float32)
    own = codec(values, two.cross.size if scatter else 1)
    return HostShard(own, values, own.output)


def reduce(two, n, seed, scatter, counts=None, **options):
    """Return the sum of everybody's gradients and the bytes sent to other hosts."""
    counts = even_counts(n, two.local.size) if counts is None else counts
    receive = np.full(n, np.nan, np.float32)
    shard = shard_of(two, counts, scatter, **options)
    sent = run(two_level(lambda _: two, gradient(two.rank, n, seed), receive, counts, shard))
    return receive, sent


@settings(max_examples=120)
@given(
    hosts=st.sampled_from(["a", "aa", "ab", "aabb", "abab", "aaabbb", "abcabc", "aabbcc"]),
    n=st.integers(0, 300),
    seed=st.integers(0, 99),
    scatter=st.booleans(),
    data=st.data(),
)
def test_ranks_are_bit_equal_and_near_the_sum(hosts, n, seed, scatter, data):
    local_size, size = hosts.count("a"), len(hosts)
    cuts = data.draw(st.lists(st.integers(0, n), min_size=local_size - 1, max_size=local_size - 1))
    counts = [int(c) for c in np.diff([0, *sorted(cuts), n])]  # some may be empty

    results = run_local(
        lambda comm: reduce(two_levels(comm, hosts), n, seed, scatter, counts), size
    )
    assert len({receive.tobytes() for receive, _ in results}) == 1
    gradients = np.array([gradient(r, n, seed) for r in range(size)], np.float64)
    sums = np.array([gradients[np.array(list(hosts)) == host].sum(0) for host in set(hosts)])
    exact = gradients.sum(0)
    # A step for each host's sum, and one for the sum of those where it is rounded once more.
    steps = np.abs(sums).max(initial=0) * len(sums) / 127
    bound = steps / 2 + (np.abs(exact).max(initial=0) + steps) / 254 * scatter
    assert (np.abs(results[0][0] - exact) <= 1.001 * bound + 1e-5).all()
    others = size // local_size - 1
    for rank, (_, sent) in enumerate(results):
        mine = counts[Topology.from_hosts(rank, hosts).local_rank]
        if not scatter or others == 0:
            assert sent == others * (4 + mine + SEAL)
        else:
            assert sent <= 2 * others * (4 + -(-mine // (others + 1)) + SEAL)


def test_fewer_elements_than_ranks_on_a_host():
    results = run_local(lambda comm: reduce(two_levels(comm, "aaabbb"), 2, 0, True)[0], 6)
    exact = sum(gradient(r, 2, 0).astype(np.float64) for r in range(6))
    assert all(r.tobytes() == results[0].tobytes() for r in results)
    np.testing.assert_allclose(results[0], exact, atol=0.1)


def test_the_output_may_be_the_input():
    def in_place(comm):
        two, n = two_levels(comm, "aabb"), 100
        counts = even_counts(n, 2)
        values = gradient(comm.rank, n, 0)
        run(two_level(lambda _: two, values, values, counts, shard_of(two, counts, True)))
        return values.tobytes(), reduce(two, n, 0, True)[0].tobytes()

    assert all(here == there for here, there in run_local(in_place, 4))


class FailsToEncode(Int8Codec):
    def encode_into(self, part, out):
        raise KeyError("boom")


class FailsToDecode(Int8Codec):
    def decode_into(self, part, payload):
        raise KeyError("boom")

    decode_sum_into = decode_into


class FailsToSum(Int8Codec):
    def decode_sum_encode(self, part, payloads, out):
        raise KeyError("boom")


class FailsWithoutUnicode(Int8Codec):
    """As of a file whose name is no UTF-8."""

    def encode_into(self, part, out):
        raise ValueError("caf\udce9")


class Short(Int8Codec):
    def __init__(self, values, parts):
        super().__init__(values, parts, shorten=True)


BOOM = "codec of rank 2 failed on its host's sum: KeyError: 'boom'"
FAILURES = [
    (FailsToEncode, True, BOOM),
    (FailsToEncode, False, BOOM),
    (FailsToSum, True, BOOM),
    (FailsToDecode, True, BOOM),
    (FailsToDecode, False, BOOM),
    (Short, True, "parts have"),
]


@pytest.mark.parametrize(
    ("hosts", "codec", "scatter", "text"),
    [(hosts, *failure) for hosts in ("aabb", "abab", "aabbcc") for failure in FAILURES]
    + [("aaa", *failure) for failure in FAILURES if not failure[1]],  # one host has one part
)
def test_a_codec_that_fails_is_one_error_everywhere_and_no_output_is_touched(
    hosts, codec, scatter, text
):
    def failing(comm):
        two, n = two_levels(comm, hosts), 90
        counts = even_counts(n, two.local.size)
        shard = shard_of(two, counts, scatter, codec if comm.rank == 2 else Int8Codec)
        receive = np.full(n, np.nan, np.float32)
        with pytest.raises(ProtocolError) as caught:
            run(two_level(lambda _: two, gradient(comm.rank, n, 0), receive, counts, shard))
        assert np.isnan(receive).all()
        if comm.rank == 2 and codec is not Short:
            assert isinstance(caught.value.__cause__, KeyError)
        return str(caught.value), reduce(two, n, 0, scatter)[0].tobytes()

    results = run_local(failing, len(hosts))
    assert len(set(results)) == 1  # and the communicator still serves
    assert text in results[0][0]


def test_a_text_that_is_no_unicode_is_told_all_the_same():
    def failing(comm):
        two, n = two_levels(comm, "aabb"), 90
        counts = even_counts(n, two.local.size)
        shard = shard_of(two, counts, True, FailsWithoutUnicode if comm.rank == 2 else Int8Codec)
        with pytest.raises(ProtocolError) as caught:
            run(
                two_level(
                    lambda _: two, gradient(comm.rank, n, 0), np.empty(n, np.float32), counts, shard
                )
            )
        return str(caught.value)

    (text,) = set(run_local(failing, 4))
    assert text == "the codec of rank 2 failed on its host's sum: ValueError: caf\\udce9"


def ramp(n):
    return np.arange(min(64 * n, 50_000), dtype=np.int32)


def pipelined(two, tasks, seed, failing=Int8Codec, overlapping=True):
    """Make exchanges of ``tasks`` overlap; return by task what it gave, or the error it raised.

    A task is its elements, whether payloads are reduced in parts, and the rank whose codec fails,
    if there is one. Sums of integers that are not compressed lie between them.
    """
    lanes = [two, *(two.sibling(i) if overlapping else two for i in range(1, 8))]
    pipeline, results = Pipeline(lambda: None, depth=3), []

    def compressed(i, n, scatter, fails):
        counts, receive = even_counts(n, two.local.size), np.full(n, np.nan, np.float32)
        shard = shard_of(two, counts, scatter, failing if two.rank == fails else Int8Codec)
        try:
            yield from two_level(
                lanes.__getitem__, gradient(two.rank, n, seed + i), receive, counts, shard
            )
            results[i] = receive.tobytes()
        except ProtocolError as error:
            assert np.isnan(receive).all()
            results[i] = str(error)

    def plain(i, n):
        values = ramp(n) * (two.rank + 1)
        yield from allreduce_steps(
            lanes.__getitem__, values, ReduceOp.SUM, "int32", lambda k: np.empty(k, np.uint8)
        )
        results[i] = values.tobytes()

    steps = []
    for n, scatter, fails in tasks:
        steps += [compressed(len(steps), n, scatter, fails), plain(len(steps) + 1, n)]
    results += [None] * len(steps)
    try:
        for each in steps:
            pipeline.add(PipelinedExchange(each, lambda: None, lambda *_: None), overlapping)
        pipeline.drain()
    finally:
        pipeline.stop(lambda: None)
    return results


@settings(max_examples=60)
@given(
    hosts=st.sampled_from(["aabb", "abab", "aaabbb", "aabbcc"]),
    tasks=st.lists(
        st.tuples(st.integers(0, 600), st.booleans(), st.sampled_from([None] * 5 + [0, 1, 2, 3])),
        max_size=6,
    ),
    failing=st.sampled_from([FailsToEncode, FailsToSum, FailsToDecode]),
    seed=st.integers(0, 99),
)
def test_exchanges_that_overlap_equal_those_one_by_one_whichever_fail(hosts, tasks, failing, seed):
    tasks = [(n, s, None if failing is FailsToSum and not s else fails) for n, s, fails in tasks]

    def one_by_one(comm):
        two = two_levels(comm, hosts)
        return [reduce(two, n, seed + 2 * i, s)[0].tobytes() for i, (n, s, _) in enumerate(tasks)]

    alone = run_local(one_by_one, len(hosts))[0]
    found = run_local(
        lambda comm: pipelined(two_levels(comm, hosts), tasks, seed, failing), len(hosts)
    )
    assert all(each == found[0] for each in found)
    ranks = sum(range(1, len(hosts) + 1))
    for (n, _, fails), got, plain, right in zip(
        tasks, found[0][::2], found[0][1::2], alone, strict=True
    ):
        assert plain == (ramp(n) * ranks).tobytes()
        if fails is None:
            assert got == right
        else:
            assert got == f"the codec of rank {fails} failed on its host's sum: KeyError: 'boom'"


@pytest.mark.parametrize(
    ("scatter", "method"), [(True, "_alltoall"), (True, "_allgather"), (False, "_allgather")]
)
def test_a_damaged_payload_is_one_error_everywhere(scatter, method):
    def faulty(comm):
        two, n = two_levels(comm, "aabb"), 90
        counts = even_counts(n, 2)
        if comm.rank == 3:
            # The first all-gather is of sizes, the second one of payloads or of sums.
            damaged(two.cross, method, flip, 0, calls=2 if method == "_allgather" else 1)
        receive = np.full(n, np.nan, np.float32)
        with pytest.raises(ProtocolError) as caught:
            run(
                two_level(
                    lambda _: two,
                    gradient(comm.rank, n, 0),
                    receive,
                    counts,
                    shard_of(two, counts, scatter),
                )
            )
        assert np.isnan(receive).all()
        return str(caught.value), reduce(two, n, 0, scatter)[0].tobytes()

    results = run_local(faulty, 4)
    assert len(set(results)) == 1
    assert "rank 3 received from rank 1 a payload that was damaged" in results[0][0]


def test_a_rank_that_leaves_ends_it_for_the_others():
    lost = []

    def leaving(comm):
        two, n = two_levels(comm, "aabb"), 90
        counts = even_counts(n, 2)
        receive = np.full(n, np.nan, np.float32)
        shard = shard_of(two, counts, True)
        steps = two_level(lambda _: two, gradient(comm.rank, n, 0), receive, counts, shard)
        if comm.rank == 1:
            next(steps).call()
            raise RuntimeError("gone")
        try:
            run(steps)
        except PeerLost as error:
            lost.append((comm.rank, error.ranks, bool(np.isnan(receive).all())))
            raise

    with pytest.raises(RuntimeError, match="gone"):
        run_local(leaving, 4)
    assert sorted(rank for rank, _, _ in lost) == [0, 2, 3]
    assert all(untouched for _, _, untouched in lost)


def test_a_codec_of_other_parts_is_refused():
    def wrong(comm):
        two = two_levels(comm, "aabb")
        values = np.zeros(2, np.float32)
        shard = HostShard(Int8Codec(values, 3), values, values)
        with pytest.raises(ValueError, match="1 part or 2, one per host, not 3"):
            run(
                two_level(
                    lambda _: two, np.zeros(4, np.float32), np.zeros(4, np.float32), [2, 2], shard
                )
            )

    run_local(wrong, 4)
