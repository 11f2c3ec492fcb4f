"""The job's store: what ranks may do with it, who is let in, and that gloo can use it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlet.ring.errors import LaunchError, PeerLost, ProtocolError
from ringlet.ring.wire.framing import Outgoing
from ringlet.ring.wire.handshake import GREETING, REFUSED
from ringlet.ring.wire.kv_client import Client, client, torch_store
from ringlet.ring.wire.kv_store import PIECE, KvStore, Op, pack, unpack
from ringlet.ring.wire.launch_link import LARGE, Kind, store_key
from ringlet.ring.wire.listener import Listener

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
SIZE = 3


class Launcher:
    """A listener and a store, served by a thread as the launcher's loop serves them."""

    def __init__(self) -> None:
        self.listener, self.kv_store = Listener(SIZE), KvStore()
        self.key = store_key(self.listener.secret)
        self.lock = threading.Lock()
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            channels = self.kv_store.channels()
            busy = [c for c in channels if c.pending]
            sources = [self._woken, *self.listener.sources(), *channels]
            ready, room, _ = select.select(sources, busy, [], 5)
            numbers = {s if isinstance(s, int) else s.fileno() for s in (*ready, *room)}
            if self._woken in ready:
                return
            with self.lock:
                for guest in self.listener.admit(numbers):
                    assert guest.visitor
                    self.kv_store.admit(guest)
                self.kv_store.serve(numbers)

    def client(self, rank: int = 0) -> Client:
        return Client(self.listener.address, self.key, rank)

    def close(self) -> None:
        self._waker.send(b"x")
        self._thread.join()
        self.kv_store.close()
        self.listener.close()
        self._woken.close()
        self._waker.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    yield one
    if one._thread.is_alive():
        one.close()


def test_what_a_rank_may_ask(launcher: Launcher) -> None:
    one, two = launcher.client(0), launcher.client(1)
    assert one.ask(Op.CHECK, b"a") == b"0"
    one.ask(Op.SET, b"a", b"\0value")
    assert two.ask(Op.GET, b"a") == b"\0value"
    assert two.ask(Op.CHECK, b"a") == b"1"
    assert two.ask(Op.CHECK, b"a", b"b") == b"0"
    assert [one.ask(Op.ADD, b"n", b"%d" % n) for n in (5, -7)] == [b"5", b"-2"]
    assert one.ask(Op.COMPARE, b"c", b"", b"first") == b"first"
    assert two.ask(Op.COMPARE, b"c", b"other", b"second") == b"first"
    assert two.ask(Op.COMPARE, b"c", b"first", b"second") == b"second"
    assert two.ask(Op.COMPARE, b"absent", b"x", b"y") == b"x"
    one.ask(Op.APPEND, b"a", b"!")
    assert one.ask(Op.GET, b"a") == b"\0value!"
    assert one.ask(Op.COUNT) == b"3"
    assert [one.ask(Op.DELETE, b"a") for _ in range(2)] == [b"1", b"0"]
    one.close()
    two.close()


def test_waiting_ends_when_the_last_name_is_there(launcher: Launcher) -> None:
    one, two = launcher.client(0), launcher.client(1)
    heard: list[bytes] = []
    waiting = threading.Thread(target=lambda: heard.append(two.ask(Op.WAIT, b"a", b"b")))
    waiting.start()
    one.ask(Op.SET, b"a", b"1")
    one.ask(Op.ADD, b"b", b"1")
    waiting.join(60)
    assert heard == [b""]
    with pytest.raises(TimeoutError, match=r"never did not appear in the store for 0\.05 s"):
        two.ask(Op.GET, b"never", timeout=0.05)
    one.ask(Op.SET, b"never", b"late")  # the answer to a wait that was given up does not count
    assert two.ask(Op.GET, b"a") == b"1"
    one.close()
    two.close()


def test_who_waits_for_what_will_not_come_is_told(launcher: Launcher) -> None:
    mine = launcher.client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mine.ask, Op.WAIT, b"epoch/1/a", b"epoch/1/b")
        launcher.client(1).ask(Op.SET, b"epoch/1/a", b"x")
        with launcher.lock:
            launcher.kv_store.refuse("epoch/1/", "rank 2 ended")
        with pytest.raises(PeerLost, match="rank 2 ended"):
            waiting.result(60)
    assert mine.ask(Op.GET, b"epoch/1/a") == b"x"  # what is there stays
    with pytest.raises(PeerLost, match="rank 2 ended"):
        mine.ask(Op.GET, b"epoch/1/c")
    with launcher.lock:
        launcher.kv_store.leave("epoch/1/c", b"late")
    assert mine.ask(Op.GET, b"epoch/1/c") == b"late"


def test_what_is_told_arrives_in_order_and_nobody_waits(launcher: Launcher) -> None:
    one = launcher.client()
    with launcher.lock:  # the store answers nobody
        for number in range(100):
            one.tell(Op.SET, b"a", b"%d" % number)
    assert one.ask(Op.GET, b"a") == b"99"
    for number in range(1000):
        one.tell(Op.ADD, b"sum", b"%d" % number)
    assert one.ask(Op.GET, b"sum") == b"%d" % sum(range(1000))
    with pytest.raises(ValueError, match="is over"):
        one.tell(Op.SET, b"a", bytes(LARGE))
    assert one.ask(Op.GET, b"a") == b"99"


def test_who_tells_something_learns_that_the_launcher_has_gone(launcher: Launcher) -> None:
    one = launcher.client()
    one.tell(Op.SET, b"a", b"1")
    launcher.close()

    def go_on() -> None:
        for _ in range(100):
            one.tell(Op.SET, b"a", b"2")

    with pytest.raises(LaunchError, match="is gone"):
        go_on()


@pytest.mark.parametrize("length", [0, 1, PIECE, 2 * PIECE + 1])
def test_long_values(launcher: Launcher, length: int) -> None:
    one, value = launcher.client(), bytes(length)
    with launcher.lock:
        launcher.kv_store.put("down", value)
    assert one.fetch("down") == value
    one.leave("up", value)
    with launcher.lock:
        assert launcher.kv_store.collect("up") == value
        assert launcher.kv_store.collect("other") is None
    with pytest.raises(ValueError, match="is over"):
        one.ask(Op.SET, b"x", bytes(LARGE + 1))
    one.close()


def test_only_who_knows_the_key_is_let_in(launcher: Launcher) -> None:
    for key in (bytes(32), launcher.listener.secret):
        with pytest.raises(LaunchError, match="rank 0 cannot reach the launcher's store"):
            Client(launcher.listener.address, key, 0)
    with pytest.raises(LaunchError, match="cannot reach"):
        launcher.client(rank=SIZE)
    host, port = launcher.listener.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as stranger:
        stranger.recv(GREETING, socket.MSG_WAITALL)
        stranger.sendall(Outgoing(bytes(32)).frame(Kind.ASK, pack(Op.COUNT, 1, [])) + bytes(73))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) in (b"", REFUSED)  # turned away, not answered
    one = launcher.client()
    assert one.ask(Op.COUNT) == b"0"
    one.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x63" + bytes(4),
        pack(Op.SET, 1, [b"name"]),
        pack(Op.ADD, 1, [b"n", b"x"]),
        b"\1" * 20,
    ],
)
def test_who_breaks_the_protocol_is_sent_away(launcher: Launcher, body: bytes) -> None:
    one, two = launcher.client(0), launcher.client(1)
    one._channel.send(Kind.ASK, body)
    one._channel.wait(60)
    with pytest.raises(LaunchError, match="is gone"):
        one.ask(Op.COUNT)
    assert two.ask(Op.COUNT) == b"0"
    two.close()


def test_who_has_gone_leaves_no_open_connection(launcher: Launcher) -> None:
    """Python warns of one that it has to close, on the launcher's standard error."""
    gc.collect()  # what other tests have left open may be closed at any time
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        own = launcher.client()
        own.ask(Op.SET, b"name", b"value")
        (there,) = launcher.kv_store.channels()
        own.close()
        until = time.monotonic() + 30
        while launcher.kv_store.channels():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert there.fileno() == -1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_launcher_that_goes_ends_a_wait(launcher: Launcher) -> None:
    one = launcher.client()
    ended = threading.Thread(target=launcher.close)
    ended.start()
    with pytest.raises(LaunchError, match="is gone"):
        one.ask(Op.GET, b"never")
    ended.join()


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=9), max_size=4))
def test_requests_survive_the_journey(op: int, number: int, fields: list[bytes]) -> None:
    body = pack(op, number, fields)
    assert unpack(body) == (op, number, fields)
    for cut in range(len(body)):
        with contextlib.suppress(ProtocolError):
            assert unpack(body[:cut])[2] == fields[: len(unpack(body[:cut])[2])]


def test_an_environment_without_the_key() -> None:
    env = {"RINGLET_RENDEZVOUS": "ringlet://127.0.0.1:1", "RINGLET_RANK": "0"}
    with pytest.raises(LaunchError, match="RINGLET_STORE_KEY is not"):
        client(env)


@needs_torch
def test_torch_and_gloo_can_use_it(launcher: Launcher) -> None:
    import torch
    import torch.distributed as dist

    ends = [launcher.client(rank) for rank in range(2)]
    stores = [torch_store(end) for end in ends]
    prefixed = dist.PrefixStore("p", stores[0])
    prefixed.set("a", "1")
    assert stores[1].get("p/a") == b"1"
    assert prefixed.add("n", 2) == 2
    assert prefixed.check(["a"])
    assert not prefixed.check(["a", "b"])
    assert stores[1].compare_set("p/a", "1", "2") == b"2"
    assert stores[1].multi_get(["p/a", "p/n"]) == [b"2", b"2"]
    assert prefixed.delete_key("n")
    assert stores[0].num_keys() == prefixed.num_keys() == 1
    prefixed.multi_set(["x", "y"], ["1", "2"])
    prefixed.append("x", "3")
    assert prefixed.multi_get(["x", "y"]) == [b"13", b"2"]
    assert prefixed.clone().get("x") == b"13"
    with pytest.raises(TimeoutError):
        stores[0].wait(["never"], timedelta(seconds=0.05))

    sums: list[torch.Tensor] = []

    def work(rank: int) -> None:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        group = gloo(dist.PrefixStore("g", stores[rank]), rank, 2, options)
        values = torch.ones(3) * (rank + 1)
        group.allreduce([values]).wait()
        sums.append(values)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [values.tolist() for values in sums] == [[3.0] * 3] * 2
    for end in ends:
        end.close()
