"""What a job is told of its network: RINGLET_LINK and hierarchical allreduces."""

import logging
import math
import os
import socket

import numpy as np
import pytest

import ringlet.job.session as runtime_module
from ringlet.fusion import Limits, Request
from ringlet.fusion.limits import UNKNOWN
from ringlet.job import link_settings
from ringlet.job.link_settings import parse_link
from ringlet.job.settings import limits_from, wishes_from
from ringlet.ring import ReduceOp, RingError
from ringlet.ring.cost import link_probe as links_module
from ringlet.ring.transports.hierarchical import LEAST, HierarchicalCommunicator
from ringlet.ring.transports.local import run_local, this_thread


@pytest.fixture
def hosts(monkeypatch):
    """Return a function that puts the ranks of this process on hosts, given by one letter each."""
    monkeypatch.setenv("RINGLET_ADDRESS", "127.0.0.1")
    for name in ("RINGLET_IFACE", "RINGLET_LINK", "RINGLET_HIERARCHICAL_ALLREDUCE"):
        monkeypatch.delenv(name, raising=False)

    def place(letters):
        own = socket.gethostname()

        def gethostname():
            comm = this_thread()
            return own if comm is None else letters[comm.rank]

        monkeypatch.setattr(runtime_module.socket, "gethostname", gethostname)

    return place


def with_runtimes(size, body):
    def rank_main(comm):
        runtime_module.init()
        try:
            return body(runtime_module.current())
        finally:
            runtime_module.shutdown()

    return run_local(rank_main, size)


def test_sums_are_compared_in_turn_where_no_wire_is_between_ranks(monkeypatch, hosts):
    def body(runtime):
        return runtime.engine.limits.verify_sums

    hosts("aa")
    assert with_runtimes(2, body) == [32, 32]
    hosts("ab")
    assert with_runtimes(2, body) == [1, 1]
    monkeypatch.setenv("RINGLET_VERIFY_SUMS", "3")
    assert with_runtimes(2, body) == [3, 3]
    monkeypatch.setenv("RINGLET_VERIFY_SUMS", "sometimes")
    with pytest.raises(ValueError, match="RINGLET_VERIFY_SUMS='sometimes' is not a whole number"):
        limits_from(os.environ)


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [
        ("100us,1Gbit/s", 1e-4, 1.25e8),
        (" 1.5 ms , 10 MB/s ", 1.5e-3, 1e7),
        ("0s,1e3kbit/s", 0.0, 1.25e5),
        ("20µs,1TB/s", 2e-5, 1e12),
        ("500ns,8bit/s", 5e-7, 1.0),
    ],
)
def test_links_are_read_in_the_usual_units(text, latency, bandwidth):
    assert parse_link(text)[:2] == pytest.approx((latency, bandwidth), rel=1e-12)
    limits = limits_from({"RINGLET_LINK": text})
    assert limits.link == parse_link(text)


@pytest.mark.parametrize(
    "text",
    ["fast", "1Gbit/s", "100us", "100us;1Gbit/s", "1m,1Gbit/s", "1us,1gbit/s", "1us,0bit/s",
     "-1us,1Gbit/s", "1us,1Gbit", "1.2.3us,1Gbit/s", "1us,1e999bit/s", "Measure"],
)  # fmt: skip
def test_what_is_no_link_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"RINGLET_LINK=.* names no link.*100us,1Gbit/s"):
        limits_from({"RINGLET_LINK": text})


def test_a_collective_is_read_and_checked():
    assert limits_from({"RINGLET_COLLECTIVE": "allgather"}).link.prefer == "allgather"
    with pytest.raises(ValueError, match="RINGLET_COLLECTIVE='ring' is not one of auto, allgather"):
        limits_from({"RINGLET_COLLECTIVE": "ring"})


def test_without_a_word_nothing_is_known_and_nothing_done():
    assert limits_from({}).link == limits_from({"RINGLET_LINK": ""}).link == UNKNOWN
    assert limits_from({"RINGLET_LINK": "measure"}).link == UNKNOWN
    assert wishes_from({}) == wishes_from({"RINGLET_HIERARCHICAL_ALLREDUCE": "0"}) == set()
    assert wishes_from({"RINGLET_LINK": "measure"}) == {"measure"}
    assert wishes_from({"RINGLET_STAGED": "1", "RINGLET_LINK": "1ms,1Gbit/s"}) == {"staged"}
    assert wishes_from({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}) == {"hierarchical"}
    assert wishes_from({"RINGLET_METRICS": "run.jsonl"}) == {"network"}


def test_a_measured_link_is_the_same_power_of_two_on_every_rank(hosts, monkeypatch):
    hosts("aabc")
    monkeypatch.setenv("RINGLET_LINK", "measure")
    found = with_runtimes(4, lambda runtime: runtime.engine.limits.link)
    assert found == [found[0]] * 4
    assert found[0].latency > 0
    assert found[0].bandwidth > 1e6
    assert all(math.log2(x).is_integer() for x in found[0][:2])


def test_on_one_host_there_is_nothing_to_measure(hosts, monkeypatch):
    hosts("aa")
    monkeypatch.setenv("RINGLET_LINK", "measure")
    assert with_runtimes(2, lambda runtime: runtime.engine.limits.link) == [UNKNOWN] * 2


def test_a_link_that_cannot_be_measured_is_an_error_on_every_rank(hosts, monkeypatch):
    hosts("ab")
    monkeypatch.setattr(links_module, "PATIENCE", 0.2)
    monkeypatch.setattr(links_module, "own_address", lambda: "192.0.2.1")  # of no host

    def refused(comm):
        with pytest.raises(RingError, match=r"a -> b could not be measured: .*Name it") as caught:
            runtime_module.Runtime(comm, Limits(), {"measure"})
        return str(caught.value)

    assert len(set(run_local(refused, 2))) == 1


@pytest.mark.parametrize("waiting", [None, 0, 80])
def test_a_process_that_stands_still_for_a_while_makes_no_link_slow(waiting):
    """What has come while the receiver stood is there at once; where the sender stood, nothing."""
    gaps = [0.005] * 200
    if waiting is not None:
        gaps[50:51] = [0.4, *[1e-5] * waiting]
        del gaps[200:]
    times = [5.0, *(5.0 + np.cumsum(gaps)).tolist()]
    received, seconds = links_module._steady([(1000 * i, now) for i, now in enumerate(times)])
    assert received == 200_000
    assert received / seconds == pytest.approx(200_000, rel=0.05)


def test_rank_0_says_whether_to_measure(hosts, monkeypatch):
    hosts("ab")
    monkeypatch.setattr(link_settings, "_SECONDS", (0.02,))

    def ask(comm):
        runtime = runtime_module.Runtime(comm, Limits(), {"measure"} if comm.rank == 0 else ())
        runtime.close()
        return runtime.engine.limits.link

    first, second = run_local(ask, 2)
    assert first == second != UNKNOWN


@pytest.mark.parametrize("letters", ["aabb", "abab", "aab", "abcd", "aaaa"])
def test_hierarchical_allreduces_where_hosts_have_equally_many_ranks(
    letters, hosts, monkeypatch, caplog
):
    hosts(letters)
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLREDUCE", "1")
    n = LEAST

    def body(runtime):
        x = np.arange(n, dtype=np.int64) * (runtime.rank + 1)
        total = runtime.engine.submit(
            Request("x", dtype="int64", shape=(n,), op=ReduceOp.SUM), x
        ).wait()
        y = np.random.default_rng(runtime.rank).standard_normal(n).astype(np.float32)
        request = Request("y", shape=(n,), op=ReduceOp.AVERAGE, spec="none")
        mean = runtime.engine.submit(request, y).wait()
        members = runtime.engine.add_process_set([0, 1])
        if runtime.rank < 2:
            both = {"op": ReduceOp.SUM, "process_set": members}
            request = Request("z", dtype="int64", shape=(n,), **both)
            pair = runtime.engine.submit(request, np.ones(n, np.int64)).wait()
            np.testing.assert_array_equal(pair, np.full(n, 2))
        return total, mean.tobytes(), runtime.transport, type(runtime.engine.comm)

    with caplog.at_level(logging.WARNING, "ringlet"):
        results = with_runtimes(len(letters), body)
    size = len(letters)
    kinds = {kind for _, _, _, kind in results}
    assert (kinds == {HierarchicalCommunicator}) == (letters in ("aabb", "abab"))
    assert len({mean for _, mean, _, _ in results}) == 1
    for total, _, transport, _ in results:
        np.testing.assert_array_equal(total, np.arange(n) * (size * (size + 1) // 2))
        assert transport == "local"
    warnings = [r.getMessage() for r in caplog.records if "hierarchical" in r.getMessage()]
    assert len(warnings) == (letters == "aab")
    assert all("2 on a, 1 on b" in text for text in warnings)
