"""Ranks in processes that somebody else has placed: numbering, the store, and lent workers."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ringlet.job.placed_call import Account, placed_rank, results
from ringlet.ring.errors import LaunchError, PeerLost
from ringlet.ring.functions import WorkerFailed
from ringlet.ring.placed.embedded import embedded
from ringlet.ring.placed.ranking import Standing, standings
from ringlet.ring.placed.store_server import FAILED, StoreServer
from ringlet.ring.placed.ticket import tickets
from ringlet.ring.wire.kv_client import Client
from ringlet.ring.wire.kv_store import Op

pytestmark = pytest.mark.preloaded("torch")
WORKER = Path(__file__).with_name("worker_placed.py")


def test_ranks_of_a_node_follow_each_other():
    assert standings(["b", "a", "b", "c", "a"]) == [
        Standing(0, 5, 0, 2, 0, 0, 3),
        Standing(2, 5, 0, 2, 1, 1, 3),
        Standing(1, 5, 1, 2, 0, 0, 2),
        Standing(4, 5, 0, 1, 2, 2, 3),
        Standing(3, 5, 1, 2, 1, 1, 2),
    ]
    assert standings([]) == []


def test_the_store_lets_in_who_has_the_key_and_nobody_else():
    with StoreServer(2) as server:
        one = Client(server.address, server.key, 0)
        one.ask(Op.SET, b"name", b"value")
        assert Client(server.address, server.key, 1).ask(Op.GET, b"name") == b"value"
        with pytest.raises(LaunchError, match="does not take this process"):
            Client(server.address, b"x" * 32, 1)
    with pytest.raises(LaunchError, match="is gone"):
        one.ask(Op.GET, b"name")


def test_who_waits_for_a_rank_that_has_failed_hears_of_it():
    with StoreServer(2) as server:
        ours = tickets(server, ["n", "n"])
        heard = []

        def wait():
            try:
                Client(server.address, server.key, 1).ask(Op.GET, b"never")
            except PeerLost as error:
                heard.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        with pytest.raises(ValueError, match="no data"), embedded(ours[0]):
            raise ValueError("no data")
        waiting.join(30)
        assert heard == ["rank 0 has failed: ValueError: no data"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"transport": "mpi"}, "MPI wants to start them itself"),
        ({"transport": "goo"}, "Did you mean 'gloo'"),
        ({"env": {"RINGLET_METRIC": "x"}}, "did you mean RINGLET_METRICS"),
        ({"env": {"SEED": 1}}, "the value of SEED is 1, which is no text"),
    ],
)
def test_what_a_job_cannot_have_is_said_before_it_starts(given, said):
    with StoreServer(1) as server, pytest.raises(LaunchError, match=said):
        tickets(server, ["n"], **given)


def test_a_worker_is_one_rank_at_a_time():
    with StoreServer(2) as server:
        ours = tickets(server, ["n", "n"])
        with placed_rank(ours[0]), pytest.raises(LaunchError, match="a rank already"):
            placed_rank(ours[1]).__enter__()


def test_a_key_is_not_shown():
    with StoreServer(1) as server:
        assert server.key.hex() not in repr(tickets(server, ["n"]))
        (ticket,) = tickets(server, ["n"])
        assert "secret" not in repr(replace(ticket, env={"AWS_SECRET_ACCESS_KEY": "a secret"}))


def test_what_a_rank_has_failed_of_is_told_whatever_characters_are_in_it():
    """Such as of a file's name that is no UTF-8."""
    with StoreServer(2) as server:
        key = bytes.fromhex(tickets(server, ["n", "n"])[0].key)
        with contextlib.closing(Client(server.address, key, 0)) as other:
            with contextlib.closing(Client(server.address, key, 1)) as failed:
                why = "ValueError: cannot read caf\udce9.txt"
                failed.ask(Op.SET, FAILED.encode(), json.dumps([1, why]).encode())
            with pytest.raises(PeerLost, match=r"rank 1 has failed: .* read caf\\udce9.txt"):
                other.ask(Op.GET, b"what it would have left", timeout=20)


@pytest.mark.parametrize("said", [b"7", b"[1]", b"no JSON", b"[" * 100_000])
def test_a_reason_that_cannot_be_read_ends_the_job_and_not_the_store(said):
    with StoreServer(2) as server:
        key = bytes.fromhex(tickets(server, ["n", "n"])[0].key)
        with contextlib.closing(Client(server.address, key, 0)) as other:
            with contextlib.closing(Client(server.address, key, 1)) as failed:
                failed.ask(Op.SET, FAILED.encode(), said)
            with pytest.raises(PeerLost, match="it has left no reason that can be read"):
                other.ask(Op.GET, b"what it would have left", timeout=20)


class Workers:
    """Processes as an engine has them: they are sent calls, and stay."""

    def __init__(self, count, **env):
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
            for _ in range(count)
        ]

    def call(self, what, **given):
        count = len(self.processes)
        with StoreServer(count) as server:
            ours = tickets(server, [f"node{i // 2}" for i in range(count)], **given)
            for process, ticket in zip(self.processes, ours, strict=True):
                process.stdin.write(pickle.dumps((what, ticket)))
                process.stdin.flush()
            return [pickle.load(process.stdout) for process in self.processes]

    def close(self):
        for process in self.processes:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)


@pytest.fixture(scope="module")
def workers():
    with contextlib.closing(Workers(3)) as made:
        yield made


def test_lent_workers_train_in_threads_time_and_again(workers):
    for _ in range(2):
        accounts, changes = zip(*workers.call("train", env={"MINE": "yes"}), strict=True)
        assert results(accounts) == [
            {"sum": 3.0, "place": place, "across": across, "mine": "yes", "torch": place[:2]}
            for place, across in [
                ((0, 3, 0, 2), (0, 2)),
                ((1, 3, 1, 2), (0, 1)),
                ((2, 3, 0, 1), (1, 2)),
            ]
        ]
        assert changes == ([],) * 3


def test_an_exception_comes_with_its_own_traceback(workers):
    accounts, changes = zip(*workers.call("raise"), strict=True)
    assert changes == ([],) * 3
    with pytest.raises(WorkerFailed, match="rank 1 raised") as failed:
        results(accounts)
    assert "the data of rank 1 are bad" in failed.value.traceback
    assert "in raise_on_one" in failed.value.traceback
    assert isinstance(failed.value.__cause__, ValueError)
    assert [account.effect for account in accounts] == [True, False, True]
    assert all(results([account]) for account, _ in workers.call("train"))


def test_a_worker_outlives_sys_exit(workers):
    accounts, changes = zip(*workers.call("exit"), strict=True)
    assert changes == ([],) * 3
    with pytest.raises(WorkerFailed, match=r"rank 2 called sys\.exit\(3\)"):
        results(accounts)
    accounts, _ = zip(*workers.call("exit well"), strict=True)
    assert results(accounts) == [None] * 3


def test_results_that_cannot_be_pickled_are_named(workers):
    accounts, _ = zip(*workers.call("lock"), strict=True)
    with pytest.raises(WorkerFailed, match=r"cannot pickle '_thread\.lock'"):
        results(accounts)


def test_the_cause_is_told_before_its_effects():
    pair = [Account(0, None, "lost", effect=True), Account(1, None, "the cause")]
    with pytest.raises(WorkerFailed, match="the cause"):
        results(pair)
