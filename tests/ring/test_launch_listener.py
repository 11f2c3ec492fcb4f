"""The launcher's listener: strangers make room, ranks of the job get in, and relays are found."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringlet.ring.elastic import driver
from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.rules import Rules
from ringlet.ring.errors import ProtocolError
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.launch import start
from ringlet.ring.launch.job import launch
from ringlet.ring.launch.start import WRAPPER, dropped, wrapper_environment
from ringlet.ring.wire import admission
from ringlet.ring.wire import entry as enter_module
from ringlet.ring.wire import listener as door_module
from ringlet.ring.wire.addresses import split_port, with_port
from ringlet.ring.wire.entry import enter, expect
from ringlet.ring.wire.handshake import (
    GREETING,
    MAGIC,
    REFUSED,
    Claim,
    Unwelcome,
    claim_from,
)
from ringlet.ring.wire.launch_link import ADDRESS, SECRET, Channel, Kind, Role
from ringlet.ring.wire.listener import Guest, Listener

WAIT = 60.0


class Porter:
    """A listener that a thread serves."""

    def __init__(self, size: int = 2) -> None:
        self.listener = Listener(size)
        self.guests: list[Guest] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            left = self.listener.patience()
            timeout = 0.05 if left is None else min(left, 0.05)
            ready, _, _ = select.select(self.listener.sources(), [], [], timeout)
            self.guests += self.listener.admit(set(ready))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.listener.close()
        for guest in self.guests:
            guest.channel.close()


@pytest.fixture
def porter() -> Iterator[Porter]:
    found = Porter()
    yield found
    found.close()


def greeted(address: str) -> socket.socket:
    """Connect as somebody who then says nothing."""
    sock = socket.create_connection(split_port(address), timeout=WAIT)
    assert len(sock.recv(GREETING, socket.MSG_WAITALL)) == GREETING
    return sock


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else can meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield with_port(*taken.getsockname())


def until(condition: object) -> None:
    assert callable(condition)
    limit = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_newcomers_get_in_though_the_door_is_full_of_strangers(
    porter: Porter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROOM", "LEAST"):
        monkeypatch.setattr(admission, name, 4)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(greeted(porter.listener.address)) for _ in range(30)]
        for rank in range(2):
            channel = enter(porter.listener.address, porter.listener.secret, rank, patience=WAIT)
            stack.enter_context(contextlib.closing(channel))
        until(lambda: len(porter.guests) == 2)
        assert sorted(guest.rank for guest in porter.guests) == [0, 1]
        gone, _, _ = select.select(crowd, [], [], 0)
        assert len(gone) >= len(crowd) - 4 - 2 * 2  # they have made room


def test_ranks_of_one_host_get_in_though_strangers_come_from_many_addresses(porter: Porter) -> None:
    """Theirs is the busiest address then: it is not for that to make room."""
    address, secret = split_port(porter.listener.address), porter.listener.secret
    with contextlib.ExitStack() as stack:
        ranks = []
        for _ in range(2):
            sock = stack.enter_context(socket.create_connection(address, timeout=WAIT))
            ranks.append((sock, sock.recv(GREETING, socket.MSG_WAITALL)))
        for number in range(280):
            source = f"127.9.{number // 100}.{number % 100 + 1}"
            stranger = socket.create_connection(address, timeout=WAIT, source_address=(source, 0))
            stack.enter_context(stranger)
            assert len(stranger.recv(GREETING, socket.MSG_WAITALL)) == GREETING
        for rank, (sock, greeting) in enumerate(ranks):
            claim, welcome, _ = claim_from(greeting, secret, Claim(Role.WRAPPER, rank, 0))
            sock.sendall(claim)
            assert sock.recv(len(welcome), socket.MSG_WAITALL) == welcome
        until(lambda: len(porter.guests) == 2)


def test_strangers_are_sent_away_in_time_though_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_module, "PATIENCE", 0.2)
    with contextlib.closing(Listener(2)) as listener, contextlib.ExitStack() as stack:
        assert listener.patience() is None
        silent = stack.enter_context(socket.create_connection(split_port(listener.address)))
        select.select(listener.sources(), [], [], WAIT)
        listener.admit(set(listener.sources()))
        left = listener.patience()
        assert left is not None
        assert left <= 0.2
        select.select([], [], [], left)
        assert listener.admit(set()) == []
        assert listener.patience() is None
        data = silent.recv(2 * GREETING)
        assert len(data) == GREETING
        assert silent.recv(1) == b""


def test_a_door_that_was_left_out_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the time for which it is shut may be up just after what to poll was chosen."""

    def short() -> tuple[socket.socket, str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(admission, "PAUSE", 0.05)
    with contextlib.closing(Listener(2)) as listener:
        door, sources = listener._admission._listener, listener.sources()
        with socket.create_connection(split_port(listener.address)):
            select.select(sources, [], [], WAIT)
            without = SimpleNamespace(accept=short, fileno=door.fileno)
            with monkeypatch.context() as patch:
                patch.setattr(listener._admission, "_listener", without)
                assert listener.admit(set(sources)) == []
            assert select.select(sources, [], [], 0) == ([], [], [])
            assert "ranks cannot connect to the launcher" in listener.complaint()
            assert listener.complaint() == ""
            select.select([], [], [], 0.06)
            assert listener.patience() == 0.0
            assert listener.admit(set()) == []
            left = listener.patience()
            assert left is not None  # who waited is in
            assert left > 1.0


def test_whoever_is_cut_off_tries_again(monkeypatch: pytest.MonkeyPatch, porter: Porter) -> None:
    tries: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            """Cut two connections off, and pass the third on."""
            for _ in range(3):
                sock, _ = listener.accept()
                tries.append(1)
                if len(tries) == 3:
                    with sock, greeted_raw(porter.listener.address) as inner:
                        pipe(sock, inner)
                sock.close()

        thread = threading.Thread(target=relay)
        thread.start()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(enter_module, "PAUSE", (0.01, 0.02))
        channel = enter(where, porter.listener.secret, 1, patience=WAIT)
        until(lambda: porter.guests)
        channel.close()
        thread.join(WAIT)
    assert len(tries) == 3
    # Trying has an end, and none where it is no use.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            enter(where, b"key", 0, patience=0.1)
    with nobody() as where, pytest.raises(ConnectionRefusedError):
        enter(where, b"key", 0, patience=WAIT)
    with pytest.raises(Unwelcome, match="does not take this process for one of the job's"):
        enter(porter.listener.address, b"key", 0, patience=WAIT)


def test_a_way_that_is_not_found_at_once_is_looked_for_again(
    porter: Porter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, usual = [], socket.create_connection

    def unheard(where: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(where)
        if len(asked) < 3 or porter.guests:
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return usual(where, timeout=timeout)

    monkeypatch.setattr(enter_module, "PAUSE", (0.01, 0.02))
    monkeypatch.setattr(enter_module.socket, "create_connection", unheard)
    channel = enter(porter.listener.address, porter.listener.secret, 1, patience=WAIT)
    until(lambda: porter.guests)
    channel.close()
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr(enter_module, "time", clock)
    monkeypatch.setattr(enter_module, "ROUTE", 0.2)
    with pytest.raises(OSError, match="No route to host"):
        enter(porter.listener.address, porter.listener.secret, 1, patience=WAIT)
    assert len(asked) > 4


def greeted_raw(address: str) -> socket.socket:
    return socket.create_connection(split_port(address), timeout=WAIT)


def pipe(one: socket.socket, two: socket.socket, change: tuple[bytes, bytes] | None = None) -> None:
    """Pass on what either end says, with ``change`` made to what ``two`` says."""
    while True:
        for source in select.select([one, two], [], [], WAIT)[0]:
            try:
                data = source.recv(1 << 16)
                if not data:
                    return
                if source is two and change is not None:
                    data = data.replace(*change)
                (two if source is one else one).sendall(data)
            except OSError:
                return


def test_a_stranger_is_refused_and_a_proof_counts_once(porter: Porter) -> None:
    for claim in (bytes(73), os.urandom(73), b"GET / HTTP/1.1\r\n" * 5):
        with greeted(porter.listener.address) as sock:
            sock.sendall(claim)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == REFUSED
                assert sock.recv(100) == b""
    with pytest.raises(Unwelcome):
        enter(porter.listener.address, porter.listener.secret, 2, patience=WAIT)  # no such rank
    assert porter.guests == []


@pytest.mark.parametrize("change", [None, (b"good", b"evil")])
def test_a_relay_cannot_change_the_command_that_runs(
    porter: Porter, tmp_path: Path, change: tuple[bytes, bytes] | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            sock, _ = listener.accept()
            with sock, greeted_raw(porter.listener.address) as inner:
                pipe(sock, inner, change)

        thread = threading.Thread(target=relay)
        thread.start()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        env = {ADDRESS: where, SECRET: porter.listener.secret.hex(), "RINGLET_RANK": "0"}
        worker = subprocess.Popen(
            WRAPPER, env={**os.environ, **env}, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        try:
            until(lambda: porter.guests or worker.poll() is not None)
            channel = porter.guests[0].channel
            begin(channel, f"open({str(tmp_path / 'good')!r}, 'w')")
            if change is None:
                assert int(expect(channel, Kind.STARTED, WAIT)) > 0
                until(lambda: (tmp_path / "good").exists())
                channel.close()
            _, err = worker.communicate(timeout=WAIT)
        finally:
            worker.kill()
            worker.communicate()
            listener.close()
            porter.guests[0].channel.close()
            thread.join(WAIT)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == ({"good"} if change is None else set())
    if change is not None:
        assert worker.returncode == 1
        assert b"a frame was changed, repeated or left out on its way" in err


def begin(channel: Channel, program: str) -> None:
    """Have the wrapper behind ``channel`` start a rank that runs ``program``."""
    job = {
        "command": [sys.executable, "-c", program],
        "env": {"RINGLET_RANK": "0", "RINGLET_SIZE": "1"},
        "drop": dropped(),
        "local_size": 1,
        "interfaces": [],
        "leads": False,
        "pmi": False,
    }
    channel.send(Kind.JOB, json.dumps(job).encode())
    channel.send(Kind.BEGIN, b"{}")


LEAVES_ONE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                         start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_wrapper_that_cannot_believe_what_comes_leaves_nothing_behind(porter: Porter) -> None:
    env = {ADDRESS: porter.listener.address, SECRET: porter.listener.secret.hex()}
    worker = subprocess.Popen(
        WRAPPER,
        env={**os.environ, **env, "RINGLET_RANK": "0"},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        until(lambda: porter.guests or worker.poll() is not None)
        channel = porter.guests[0].channel
        begin(channel, LEAVES_ONE)
        assert int(expect(channel, Kind.STARTED, WAIT)) > 0
        child = int(expect(channel, Kind.STDOUT, WAIT))
        channel._sock.sendall(bytes(64))  # somebody on the way
        _, err = worker.communicate(timeout=WAIT)
    finally:
        worker.kill()
        worker.communicate()
    assert worker.returncode == 1
    (said,) = err.splitlines()
    assert re.match(
        r"rank 0, host .*, was killed: what came from the launcher at 127\.0\.0\.1:\d+ could not be"
        r" believed: a frame of kind 0 and 0 bytes is not allowed",
        said,
    )
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize("elastic", [False, True])
def test_whose_words_were_changed_on_the_way_is_named_with_the_cause(
    elastic: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relayed(address: str, secret: bytes) -> dict[str, str]:
            def relay() -> None:
                sock, _ = listener.accept()
                with sock, greeted_raw(address) as inner:
                    pipe(inner, sock, (b"all is well", b"all is lost"))

            threads.append(threading.Thread(target=relay))
            threads[-1].start()
            where = f"127.0.0.1:{listener.getsockname()[1]}"
            return wrapper_environment(where, secret)

        monkeypatch.setattr(start, "wrapper_environment", relayed)
        code = "print('all ' 'is well', flush=True); import time; time.sleep(1000)"
        command = [sys.executable, "-c", code]
        if elastic:
            hosts = Discovery(None, hosts=[Host("localhost", 1)])
            code_of = driver.launch(command, Rules(1, 1), hosts, "gloo")
        else:
            code_of = launch(command, 1, "gloo")
        for thread in threads:
            thread.join(WAIT)
    assert code_of == 137
    out, err = capfd.readouterr()
    assert "lost" not in out
    assert (
        " was killed, as its wrapper could not be believed: a frame was changed, repeated or left"
        " out on its way" in err
    )


def test_a_wrapper_that_does_not_reach_its_launcher_says_so_in_a_sentence() -> None:
    with nobody() as where:
        env = {ADDRESS: where, SECRET: bytes(32).hex(), "RINGLET_RANK": "3"}
        done = subprocess.run(
            WRAPPER, env=os.environ | env, capture_output=True, text=True, timeout=WAIT, check=False
        )
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert said.startswith("rank 3, host ")
    assert f"no connection to the launcher at {where}: " in said
    assert "Connection refused" in said


def test_what_a_wrapper_says_is_written_with_the_end_of_its_line() -> None:
    """Others write to the same pipe, maybe in between."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a write is a packet
    with nobody() as where, ours:
        env = {ADDRESS: where, SECRET: bytes(32).hex(), "RINGLET_RANK": "3"}
        with theirs:
            process = subprocess.Popen(
                WRAPPER, env=os.environ | env | {"PYTHONUNBUFFERED": "1"}, stderr=theirs
            )
        assert process.wait(WAIT) == 1
        said = ours.recv(1 << 12)
        assert said.startswith(b"rank 3, host ")
        assert said.endswith(b"\n")
        assert ours.recv(1 << 12) == b""


def test_only_the_launcher_is_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"

        def impostor() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(MAGIC + bytes(32))
                sock.recv(1000)
                sock.sendall(b"x" * 32)

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ProtocolError, match="does not know this job's secret"):
            enter(where, b"secret", 0, patience=WAIT)
        thread.join(WAIT)
