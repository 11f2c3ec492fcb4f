"""Who may take part in a gloo group: only ranks that know the job's key, whoever connects first."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import LaunchError, PeerLost, ProtocolError
from ringlet.ring.interrupt import Connections
from ringlet.ring.rendezvous.connect import loopback
from ringlet.ring.transports.gloo_proof import PROOF, StoreBarrier, admit
from ringlet.ring.transports.local import run_local
from ringlet.ring.wire.framing import derive
from ringlet.ring.wire.keys import agreed_key, job_key

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
    pytest.mark.preloaded("torch"),
]

HERE = Path(__file__).parent
WAIT = 120.0
KEY = {"RINGLET_SECRET": secrets.token_hex(32)}


class Jobs:
    """Starts processes; whatever happens, none is left."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *args: object, env: dict[str, str]) -> subprocess.Popen[str]:
        base = {n: v for n, v in os.environ.items() if not n.startswith("RINGLET_")}
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**base, **env, "OMP_NUM_THREADS": "1"},
        )
        self.started.append(process)
        return process

    def rank(
        self, rank: int, size: int, *more: int, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        # The one with the lower address is connected to, the other one connects.
        host = f"127.0.0.{1 + rank}"
        given = KEY if env is None else env
        return self.start("worker_seized.py", self.store, rank, size, host, *more, env=given)

    def intruder(self, victim: subprocess.Popen[str], number: int, file: Path) -> None:
        """Have somebody take the place that has ``number`` for the rank ``victim``."""
        process = self.start("intruder_gloo.py", victim.pid, number, file, env={})
        assert process.stdout is not None
        assert process.stdout.readline() == "SEATED\n"


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    found = Jobs(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.communicate()


def said(*processes: subprocess.Popen[str]) -> list[str]:
    """Let processes go on, and return what each has printed until its end."""
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.flush()
    return [process.communicate(timeout=WAIT)[0] for process in processes]


def test_a_place_that_somebody_has_taken_is_noticed(jobs: Jobs, tmp_path: Path) -> None:
    evil, size = tmp_path / "code-has-run", 3
    first = jobs.rank(0, size)
    jobs.intruder(first, 1, evil)  # before rank 1, the last one, even starts
    ranks = [first, *(jobs.rank(rank, size) for rank in range(size - 1, 0, -1))]
    texts = set(said(*ranks))
    assert len(texts) == 1, texts
    (text,) = texts
    assert text.startswith(
        f"ProtocolError whoever has connected to rank 0 (host {socket.gethostname()}) over gloo as"
        " rank 1 does not know the job's key"
    )
    assert not evil.exists()
    heard = bytes.fromhex(said(jobs.started[1])[0])
    assert b"the job's secret" not in heard


BUSY = """
import os, socket, sys
from torch.distributed import FileStore
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.transports.gloo_proof import StoreBarrier
from ringlet.ring.wire.keys import job_key

class Busy(StoreBarrier):
    def meet(self):
        global server, near, far
        server = socket.create_server(("127.0.0.1", 0))  # as another thread may
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        super().meet()

GlooCommunicator._connect.__globals__["StoreBarrier"] = Busy
store = FileStore(sys.argv[1], 2)
key = job_key(os.environ)
comm = GlooCommunicator(store, int(sys.argv[2]), 2, 60.0, host="127.0.0.1", key=key)
with socket.create_connection(server.getsockname(), timeout=20):
    print("STILL LISTENS", flush=True)
comm.interrupt()
near.sendall(b"STILL CONNECTED")
print(far.recv(15, socket.MSG_WAITALL).decode(), flush=True)
comm.close()
"""


def test_what_the_program_opens_while_ranks_meet_is_left_alone(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    script = str(tmp_path / "busy.py")
    ranks = [jobs.start(script, jobs.store, rank, env=KEY) for rank in range(2)]
    assert said(*ranks) == ["STILL LISTENS\nSTILL CONNECTED\n"] * 2


class Relay:
    """Somebody between two ranks: passes all on, and notes it."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def join(self, *ends: socket.socket) -> None:
        """Let two connections lead to each other."""
        self._ends += ends
        for source, to in (ends, ends[::-1]):
            thread = threading.Thread(target=self._pass_on, args=(source, to))
            thread.start()
            self._threads.append(thread)

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT)
        for end in self._ends:
            end.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    found = Relay()
    yield found
    found.close()


def diverted(jobs: Jobs, rank: int, host: str, *place: str) -> subprocess.Popen[str]:
    """Start a rank at ``host`` that the other one finds at ``place``."""
    return jobs.start("worker_diverted.py", jobs.store, rank, 2, host, *place, env=KEY)


@pytest.mark.parametrize("ways", ["rank 1 connects", "both connect", "both listen"])
def test_who_changes_addresses_in_the_store_does_not_get_between_ranks(
    jobs: Jobs, relay: Relay, ways: str
) -> None:
    # The one with the lower address is connected to, the other one connects.
    with socket.create_server(("127.0.0.2", 0)) as listener:
        listener.settimeout(WAIT)
        here = f"127.0.0.2:{listener.getsockname()[1]}"
        if ways == "rank 1 connects":
            ranks = [diverted(jobs, 0, "127.0.0.1", here), diverted(jobs, 1, "127.0.0.3")]
            near, far = listener.accept()[0], socket.create_connection(listener_of(ranks[0].pid))
        elif ways == "both connect":
            ranks = [diverted(jobs, rank, f"127.0.0.{3 + rank}", here) for rank in range(2)]
            near, far = (listener.accept()[0] for _ in ranks)
            for end in (near, far):  # each begins with the number of the pair that it means
                assert len(end.recv(8, socket.MSG_WAITALL)) == 8
        else:
            places = "127.0.0.8:1", "127.0.0.9:1"
            ranks = [
                diverted(jobs, rank, f"127.0.0.{3 + rank}", place)
                for rank, place in enumerate(places)
            ]
            near, far = (socket.create_connection(listener_of(rank.pid)) for rank in ranks)
            for end, number in ((near, 1), (far, 0)):
                end.sendall(number.to_bytes(8, "little"))
        relay.join(near, far)
        texts = set(said(*ranks))
    assert len(texts) == 1, texts
    (text,) = texts
    assert re.match(
        r"ProtocolError no connection over gloo leads straight from rank (0|1) \(host .*\) to rank"
        r" (?!\1)[01]: somebody has changed an address where ranks meet, and stands between",
        text,
    )
    assert relay.heard
    assert b"the job's secret" not in relay.heard


def test_all_connections_are_known_though_torch_would_connect_late(jobs: Jobs) -> None:
    env = {**KEY, "TORCH_GLOO_LAZY_INIT": "1"}
    ranks = [
        jobs.start("worker_diverted.py", jobs.store, rank, 2, "127.0.0.1", env=env)
        for rank in range(2)
    ]
    assert said(*ranks) == ["the job's secret, of 1 known connection\n"] * 2


def test_nothing_in_the_store_lets_in_whoever_has_not_proved_the_key() -> None:
    from torch.distributed import HashStore

    store = HashStore()  # as torch's TCPStore, to which anybody can connect
    store.add("proof/failures", 5)
    store.set("proof/all proved", "well")

    def rank_main(comm: Communicator) -> str:
        barrier = StoreBarrier(store, comm.rank, comm.size, WAIT)
        barrier.keyed(True)
        with pytest.raises(ProtocolError) as caught:
            admit(comm, barrier, b"%032d" % comm.rank, Connections())
        return str(caught.value)

    for rank, text in enumerate(run_local(rank_main, 2)):
        assert f"as rank {1 - rank} does not know the job's key" in text


def test_what_anybody_has_left_in_the_store_is_shown_and_not_obeyed() -> None:
    from torch.distributed import HashStore

    told = "\x1b]0;title\x07\nringlet run: all is well\u202e" + 9999 * "x"
    shown = r"\x1b]0;title\x07\nringlet run: all is well\u202exx"
    for key, said, begins in (
        (None, PROOF * " " + "taken " + told, shown),
        (None, told, "somebody has left in the store where ranks meet what no rank of this job"),
        (None, "", "somebody has left in the store"),
        (bytes(32), PROOF * " " + "taken " + told, "somebody has left in the store"),
        (bytes(32), PROOF * "0" + "taken " + told, "somebody has left in the store"),
    ):
        store = HashStore()
        store.set("proof/all connected", said)
        with pytest.raises(ProtocolError) as caught:
            StoreBarrier(store, 1, 2, WAIT, key=key).pass_together("connected")
        assert str(caught.value).isprintable()
        assert str(caught.value).startswith(begins)
        assert 0 < len(str(caught.value)) < 3000


def test_what_a_rank_says_is_believed_for_its_key() -> None:
    from torch.distributed import HashStore

    for key in (None, bytes(32)):
        store = HashStore()
        ranks = [StoreBarrier(store, rank, 2, WAIT, key=key) for rank in range(2)]
        with pytest.raises(ProtocolError, match=r"^what was wrong$"):
            ranks[0].fail("taken", "what was wrong")
        with pytest.raises(ProtocolError, match=r"^what was wrong$"):
            ranks[1].pass_together("connected")


class Watched:
    """A store in which nobody's first wait begins before ``count`` ranks have come to wait."""

    def __init__(self, store: Any, count: int) -> None:
        self._store, self._come = store, threading.Barrier(count)
        self._own = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, names: list[str], timeout: timedelta) -> None:
        if not hasattr(self._own, "come"):
            self._own.come = self._come.wait(WAIT)
        self._store.wait(names, timeout)


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        ([0, 1, 2, 3], "ranks 1, 3 have not reached init() within 0.05 s: see what hangs there"),
        ([2, 4, 5, 7], "ranks 4, 7 have not reached the group of ranks 2, 4, 5, 7 within 0.05 s: "),
    ],
)
def test_ranks_that_do_not_come_are_named_to_all_alike(origin: list[int], text: str) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    watched = Watched(store, 2)

    def rank_main(comm: Communicator) -> PeerLost:
        with pytest.raises(PeerLost) as caught:
            StoreBarrier(watched, 2 * comm.rank, 4, 0.05, origin).meet()
        return caught.value

    errors = run_local(rank_main, 2)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(text)
    assert [error.ranks for error in errors] == [(origin[1], origin[3])] * 2
    for late in (1, 3):  # they hear the same, and do not wait for who has gone
        with pytest.raises(PeerLost, match=r"^ranks \d, \d have not reached"):
            StoreBarrier(store, late, 4, WAIT, origin).meet()


@pytest.mark.parametrize("seen", [False, True])
def test_ranks_meet_though_the_last_one_comes_as_another_gives_up(seen: bool) -> None:
    """It took the others for there, who said that it was not, and waited for them in gloo."""
    from torch.distributed import HashStore

    store = HashStore()

    class GivesUp(StoreBarrier):
        def _absent(self) -> list[int]:
            absent = super()._absent()
            StoreBarrier(store, 1, 2, WAIT).meet()
            return absent

    if seen:  # it is here, and stands still before it says that now all are
        store.set("proof/here 1", "well")
        StoreBarrier(store, 0, 2, 0.05).meet()
        StoreBarrier(store, 1, 2, WAIT).meet()
    else:
        GivesUp(store, 0, 2, 0.05).meet()


def test_when_the_store_has_gone_nobody_is_named() -> None:
    from torch.distributed import HashStore

    class Gone(HashStore):  # type: ignore[misc]
        def wait(self, *_: object) -> None:
            raise RuntimeError("Connection reset by peer")

        def check(self, *_: object) -> bool:
            raise RuntimeError("Broken pipe")

    with pytest.raises(PeerLost, match=r"^rank 0 of 2 waited 0 s .* reset by peer$") as told:
        StoreBarrier(Gone(), 0, 2, WAIT).meet()
    assert (type(told.value), told.value.ranks) == (PeerLost, ())  # as tracebacks show it


def test_ranks_that_come_meet() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    assert run_local(lambda comm: StoreBarrier(store, comm.rank, 3, WAIT).meet(), 3) == [None] * 3


def test_whoever_is_silent_in_a_place_is_noticed_too(jobs: Jobs, tmp_path: Path) -> None:
    code = "import runpy, sys; from ringlet.ring.transports import gloo_proof; "
    code += "gloo_proof.PATIENCE = 1.0; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    ranks = []
    for rank in range(2):
        args = [HERE / "worker_seized.py", jobs.store, rank, 2, f"127.0.0.{1 + rank}"]
        (tmp_path / "hurried.py").write_text(code)
        ranks.append(jobs.start(str(tmp_path / "hurried.py"), *args, env=KEY))
        if rank == 0:
            where = listener_of(ranks[0].pid)
            silent = socket.create_connection(where)
            silent.sendall((1).to_bytes(8, "little"))
    with silent:
        texts = set(said(*ranks))
    assert len(texts) == 1, texts
    (text,) = texts
    assert "could not make sure over gloo who the other ranks are within 1 s" in text
    assert (
        "somebody on the network may have connected in the place of one, and says nothing" in text
    )
    assert "Connection closed" not in text  # which this rank has done itself


def listener_of(pid: int) -> tuple[str, int]:
    spec = importlib.util.spec_from_file_location("intruder", HERE / "intruder_gloo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    where: tuple[str, int] = module.listener_of(pid)
    return where


@pytest.mark.parametrize("env", [KEY, {}])
def test_ranks_that_have_the_same_key_or_none_are_let_in(jobs: Jobs, env: dict[str, str]) -> None:
    ranks = [jobs.rank(rank, 3, env=env) for rank in range(3)]
    assert said(*ranks) == ["READY\nOPENED hello\n"] * 3


def test_a_rank_with_another_key_or_without_one_is_named(jobs: Jobs, tmp_path: Path) -> None:
    other = {"RINGLET_SECRET": "another text, long enough"}
    ranks = [jobs.rank(rank, 2, env=env) for rank, env in enumerate((KEY, other))]
    for text in said(*ranks):
        assert "does not know the job's key" in text
        assert "or it has another RINGLET_SECRET" in text
    jobs.store = tmp_path / "store2"
    ranks = [jobs.rank(rank, 2, env=env) for rank, env in enumerate((KEY, {}))]
    for text in said(*ranks):
        assert text.startswith("LaunchError 1 of 2 ranks have a key of the job: set RINGLET_SECRET")


def test_idle_connections_do_not_end_a_rank(jobs: Jobs) -> None:
    first = jobs.rank(0, 2, 256)
    where = listener_of(first.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(where))
        ranks = [first, jobs.rank(1, 2, 256)]
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
        # From now on nobody else gets in.
        with pytest.raises(TimeoutError):
            socket.create_connection(where, timeout=0.5)
        assert said(*ranks) == ["OPENED hello\n"] * 2


def test_ranks_that_meet_on_loopback_stay_there() -> None:
    for place, where in {
        None: "127.0.0.1",
        "file:///tmp/x": "127.0.0.1",
        "tcp://127.0.0.5:29500": "127.0.0.5",
        "tcp://[::1]:29500": "::1",
        "tcp://localhost:29500": "127.0.0.1",
        "tcp://10.1.2.3:29500": None,
        "tcp://head-node:29500": None,
    }.items():
        assert loopback(place, {}) == where
    assert loopback("env://", {"MASTER_ADDR": "localhost"}) == "127.0.0.1"
    assert loopback("env://", {"MASTER_ADDR": "10.0.0.1"}) is None


def test_the_key_of_a_job() -> None:
    assert job_key({}) is None
    assert job_key({"RINGLET_STORE_KEY": "00ff", **KEY}) == b"\x00\xff"
    text = job_key({"RINGLET_SECRET": "x" * 16})
    assert text is not None
    assert len(text) == 32
    with pytest.raises(LaunchError, match="RINGLET_SECRET has 15 characters"):
        job_key({"RINGLET_SECRET": "x" * 15})
    with pytest.raises(LaunchError, match="RINGLET_STORE_KEY is not what"):
        job_key({"RINGLET_STORE_KEY": "xyz"})
    assert derive(text, "a") != derive(text, "b") != text


def test_ranks_agree_on_a_key_without_telling_it() -> None:
    told: list[bytes] = []

    def agree(env: dict[str, str]) -> list[bytes]:
        def one(comm):  # type: ignore[no-untyped-def]
            real = comm.allgather_bytes
            comm.allgather_bytes = lambda data: told.append(data) or real(data)
            return agreed_key(comm, "objects", env)

        return run_local(one, 2)

    one, two = agree(KEY)
    assert one == two
    key = job_key(KEY)
    assert key is not None
    assert one == derive(key, "objects")
    assert not any(secret in b"".join(told) for secret in (one, key))
    random = agree({})
    assert random[0] == random[1] != agree({})[0]


def test_ranks_whose_keys_differ_are_named() -> None:
    def one(comm, envs):  # type: ignore[no-untyped-def]
        with pytest.raises(LaunchError) as caught:
            agreed_key(comm, "objects", envs[comm.rank])
        return str(caught.value)

    other = {"RINGLET_SECRET": "another text, long enough"}
    (text,) = set(run_local(lambda comm: one(comm, [KEY, other, KEY]), 3))
    assert text.startswith(
        "rank 1 of 3 does not have the same key as the other ranks: set RINGLET_SECRET"
    )
    (text,) = set(run_local(lambda comm: one(comm, [{}, KEY, {}]), 3))
    assert text.startswith("ranks 0, 2 of 3 have no key, though other ranks have one")
