"""The control plane: order, wake-ups, partings, failures, and strangers at the door."""

import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ringlet.ring import Communicator, PeerLost, RingError, control_frames, control_hub
from ringlet.ring.control_frames import MAGIC, MESSAGE, NONCE, READY, frame
from ringlet.ring.control_hub import TcpHub
from ringlet.ring.control_local import LocalControl
from ringlet.ring.control_open import _prove, join, open_control
from ringlet.ring.control_tcp import TcpControl
from ringlet.ring.local import LocalWorld, run_local
from ringlet.ring.network import listen, own_address

WORKER = Path(__file__).with_name("worker_control.py")
SECRET = secrets.token_bytes(32)
WAIT = 30.0


class Echo:
    """Broadcasts what it hears, with the rank; and who was lost."""

    def __init__(self):
        self.lost = []

    def on_message(self, rank, message):
        if message == b"raise":
            raise ValueError("handler")
        return [b"%d:" % rank + message] if message else []

    def on_lost(self, rank, why=""):
        self.lost.append(rank)
        return [b"lost %d" % rank]


class Wrapped(Communicator):
    """A local rank that does not look like one, so that its control plane is TCP."""

    name = "wrapped"

    def __init__(self, comm):
        self.rank, self.size = comm.rank, comm.size
        for method in ("allgather", "broadcast", "barrier", "close"):
            setattr(self, method, getattr(comm, method))

    _allreduce = _allgather = _alltoall = _reduce_scatter = _broadcast = _barrier = None
    _subset = _close = None


def collect(control, n):
    """Receive until there are ``n`` broadcasts."""
    messages = []
    deadline = time.monotonic() + WAIT
    while len(messages) < n:
        assert time.monotonic() < deadline, messages
        messages += control.receive(1.0)
    return messages


@contextmanager
def star(size, handler, ranks=None):
    """Yield the hub and the TCP ends of ``ranks`` (default: all others) in this process."""
    listener = listen("127.0.0.1")
    where = listener.getsockname()
    hub = TcpHub(handler, size, SECRET, listener)
    ends = {}

    def enter(rank):
        ends[rank] = join(where, SECRET, rank, size, WAIT)

    others = range(1, size) if ranks is None else ranks
    threads = [threading.Thread(target=enter, args=(rank,)) for rank in others]
    for thread in threads:
        thread.start()

    def complete():
        hub.wait_open(WAIT)
        for thread in threads:
            thread.join()
        return [ends[rank] for rank in others]

    try:
        yield hub, where, complete
    finally:
        hub.close()
        for thread in threads:
            thread.join()
        for end in ends.values():
            end.close()


@pytest.mark.parametrize(("tcp", "size"), [(False, 1), (False, 4), (True, 2), (True, 4)])
def test_all_ranks_hear_the_same_in_the_same_order(tcp, size):
    each = 50

    def run(comm):
        own = Wrapped(comm) if tcp else comm
        control = open_control(own, Echo() if comm.rank == 0 else None)
        expected = LocalControl if not tcp else TcpHub if comm.rank == 0 else TcpControl
        assert type(control) is expected
        for i in range(each):
            control.send(b"%d" % i)
        heard = collect(control, each * size)
        comm.barrier()
        control.close()
        control.close()
        return heard

    heard = run_local(run, size)
    assert all(h == heard[0] for h in heard)
    for rank in range(size):
        mine = [m.partition(b":")[2] for m in heard[0] if m.startswith(b"%d:" % rank)]
        assert mine == [b"%d" % i for i in range(each)]


def test_large_messages_arrive_whole():
    with star(3, Echo()) as (hub, _, complete):
        ends = complete()
        big = os.urandom(5_000_000)
        ends[0].send(big)
        for control in (hub, *ends):
            assert collect(control, 1) == [b"1:" + big]
        with pytest.raises(ValueError, match="limit"):
            ends[0].send(bytes(control_frames.LIMIT + 1))


@pytest.mark.parametrize("which", ["local", "hub", "end"])
def test_wake_and_timeout_end_a_wait(which):
    with star(2, Echo()) as (hub, _, complete):
        [end] = complete()
        alone = open_control(LocalWorld(1).communicators[0], Echo())
        control = {"local": alone, "hub": hub, "end": end}[which]
        assert control.receive(0) == []
        assert control.receive(0.01) == []
        for _ in range(3):
            control.wake()  # the next call returns at once
        assert control.receive(WAIT) == []
        assert control.receive(0) == []
        results = []
        waiting = threading.Thread(target=lambda: results.append(control.receive()))
        waiting.start()
        control.wake()
        waiting.join(WAIT)
        assert results == [[]]
        alone.close()


@pytest.mark.parametrize("which", ["local", "hub", "end"])
def test_close_ends_a_wait_and_later_calls_say_so(which):
    with star(2, Echo()) as (hub, _, complete):
        [end] = complete()
        alone = open_control(LocalWorld(1).communicators[0], Echo())
        control = {"local": alone, "hub": hub, "end": end}[which]
        errors = []

        def wait():
            with suppress(PeerLost):
                try:
                    control.receive()
                except RingError as error:
                    errors.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        control.close()
        waiting.join(WAIT)
        assert errors == ["this control plane is closed"]
        for call in (lambda: control.send(b""), control.receive, control.wake):
            with pytest.raises(RingError, match="closed"):
                call()
        control.close()


def test_goodbyes_are_no_losses():
    handler = Echo()
    with star(3, handler) as (hub, _, complete):
        one, two = complete()
        one.send(b"last")
        one.close()
        assert collect(hub, 1) == collect(two, 1) == [b"1:last"]
        two.send(b"still here")
        assert collect(hub, 1) == [b"2:still here"]
        hub.send(b"the end")
        hub.close()
        assert handler.lost == []
        assert collect(two, 2) == [b"2:still here", b"0:the end"]
        for call in (lambda: two.receive(WAIT), lambda: two.receive(WAIT)):
            with pytest.raises(PeerLost, match="closed the control plane") as caught:
                call()
            assert caught.value.ranks == (0,)


def test_a_killed_rank_is_reported_to_the_handler_and_by_it_to_the_others():
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        command = [sys.executable, str(WORKER), str(where[1]), "2", "3"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                process.stdin.write(SECRET.hex().encode() + b"\n")
                process.stdin.flush()
                [one] = complete()
                assert collect(hub, 1) == collect(one, 1) == [b"2:here"]
                assert process.stdout.readline() == b"2:here\n"
            finally:
                process.kill()
        assert collect(hub, 1) == collect(one, 1) == [b"lost 2"]
        assert handler.lost == [2]


def test_a_failing_local_rank_is_lost_to_the_control_plane():
    handler = Echo()
    heard = {}

    def run(comm):
        control = open_control(comm, handler if comm.rank == 0 else None)
        if comm.rank == 2:
            raise KeyError("boom")
        heard[comm.rank] = collect(control, 1)
        control.close()

    with pytest.raises(KeyError):
        run_local(run, 3)
    assert heard == {0: [b"lost 2"], 1: [b"lost 2"]}


def test_local_ranks_learn_that_the_coordinator_is_gone():
    def run(comm):
        control = open_control(comm, Echo() if comm.rank == 0 else None)
        if comm.rank == 0:
            raise KeyError("boom")
        with pytest.raises(PeerLost, match="rank 0, the coordinator, failed with KeyError"):
            control.receive(WAIT)
        with pytest.raises(PeerLost):
            control.send(b"x")

    with pytest.raises(KeyError):
        run_local(run, 2)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_handler_that_raises_ends_the_service_with_its_own_error_on_rank_0(tcp):
    def run(comm):
        control = open_control(Wrapped(comm) if tcp else comm, Echo() if comm.rank == 0 else None)
        if comm.rank == 1:
            control.send(b"raise")
        with pytest.raises((ValueError, PeerLost)) as caught:
            control.receive(WAIT)
        comm.barrier()
        control.close()
        return type(caught.value)

    assert run_local(run, 3) == [ValueError, PeerLost, PeerLost]


def test_rank_0_without_a_handler_fails_on_every_rank():
    def run(comm):
        with pytest.raises((ValueError, RingError)) as caught:
            open_control(Wrapped(comm))
        comm.barrier()
        return str(caught.value)

    assert run_local(run, 2) == [
        "rank 0 needs a handler",
        "rank 0 could not open the control plane; its own error says why",
    ]


def greeted(where):
    """Connect as a stranger and return the socket with the hub's nonce."""
    sock = socket.create_connection(where, timeout=WAIT)
    greeting = b""
    while len(greeting) < len(MAGIC) + NONCE:
        greeting += sock.recv(len(MAGIC) + NONCE - len(greeting))
    return sock, greeting


def ended(sock):
    """Return whether the hub closed the connection without another word."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
    finally:
        sock.close()


def test_strangers_are_dropped_and_the_service_goes_on(monkeypatch):
    monkeypatch.setattr(control_hub, "HANDSHAKE", 0.3)
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        # A wrong key, both ways round: the hub drops it, and join says why.
        sock, _ = greeted(where)
        sock.sendall(struct.pack("<II", 2, 3) + bytes(NONCE) + bytes(32))
        assert ended(sock)
        # A hello that was good for another connection.
        recorder = Recorder(where)
        with suppress(OSError):
            _prove(recorder, SECRET, 7, 3)
        sock, _ = greeted(where)
        sock.sendall(recorder.sent)
        assert ended(sock)
        # Random bytes, an HTTP request, a 4 GiB length, more than was asked for.
        for garbage in (os.urandom(72), b"GET / HTTP/1.1\r\n" * 5, b"\xff" * 72, bytes(100_000)):
            sock, _ = greeted(where)
            with suppress(OSError):
                sock.sendall(garbage)
            assert ended(sock)
        # One that sends too slowly, and one that says nothing: dropped when their time is up.
        slow, _ = greeted(where)
        slow.sendall(b"x")
        silent, _ = greeted(where)
        assert ended(slow)
        assert ended(silent)
        with pytest.raises(PeerLost, match="join"):
            join(where, bytes(32), 2, 3, timeout=0.2)
        monkeypatch.undo()
        two = join_in_thread(where, 2, 3)
        [one] = complete()
        two = two()
        two.send(b"hello")
        assert collect(hub, 1) == collect(one, 1) == collect(two, 1) == [b"2:hello"]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(where, timeout=WAIT)
        assert handler.lost == []
        two.close()


class Recorder:
    """A socket that remembers what was sent through it."""

    def __init__(self, where):
        self._sock = socket.create_connection(where, timeout=WAIT)
        self.sent = b""

    def sendall(self, data):
        self.sent += data
        self._sock.sendall(data)

    def __getattr__(self, name):
        return getattr(self._sock, name)


def join_in_thread(where, rank, size):
    ends = []
    thread = threading.Thread(target=lambda: ends.append(join(where, SECRET, rank, size, WAIT)))
    thread.start()

    def result():
        thread.join(WAIT)
        return ends[0]

    return result


def raw_member(where, rank, size):
    """Join as a rank that then does what it likes with its socket."""
    sock = socket.create_connection(where, timeout=WAIT)
    _prove(sock, SECRET, rank, size)
    return sock


@pytest.mark.parametrize(
    "evil",
    [struct.pack("<QB", 1 << 32, MESSAGE), struct.pack("<QB", 1, 77) + b"x", b"\xff" * 1000],
    ids=["4 GiB", "unknown kind", "garbage"],
)
def test_a_member_that_breaks_the_protocol_is_lost_and_the_others_go_on(evil):
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        sock = raw_member(where, 2, 3)
        [one] = complete()
        sock.sendall(evil)
        assert collect(hub, 1) == collect(one, 1) == [b"lost 2"]
        one.send(b"on we go")
        assert collect(hub, 1) == [b"1:on we go"]
        sock.close()


def test_a_reader_that_does_not_read_blocks_nobody(monkeypatch):
    monkeypatch.setattr(control_hub, "BACKLOG", 24 << 20)
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        sock = raw_member(where, 2, 3)
        [one] = complete()
        megabyte = bytes(1 << 20)
        heard = []
        for _ in range(40):
            hub.send(megabyte)
            heard += collect(one, 1)
        heard += collect(one, 41 - len(heard))
        assert heard.count(b"0:" + megabyte) == 40
        assert heard.count(b"lost 2") == 1  # its queue grew over the limit
        sock.close()


def test_a_slow_reader_gets_everything():
    with star(2, Echo(), ranks=[]) as (hub, where, complete):
        sock = raw_member(where, 1, 2)
        complete()
        megabyte = bytes(1 << 20)
        for _ in range(20):
            hub.send(megabyte)
        expected = len(frame(READY)) + 20 * len(frame(MESSAGE, b"0:" + megabyte))
        received = 0
        while received < expected:
            data = sock.recv(1 << 16)
            assert data
            received += len(data)
        sock.close()


def test_one_rank_cannot_join_twice_and_a_missing_rank_is_named():
    with star(3, Echo(), ranks=[]) as (hub, where, _):
        first = raw_member(where, 1, 3)
        second = socket.create_connection(where, timeout=WAIT)
        with pytest.raises(OSError, match=r"closed|reset"):
            _prove(second, SECRET, 1, 3)
        with pytest.raises(PeerLost, match="ranks 2 did not join") as caught:
            hub.wait_open(0.05)
        assert caught.value.ranks == (2,)
        first.close()
        second.close()


def test_a_forked_child_gets_a_clear_error_and_holds_no_connection():
    with star(2, Echo()) as (hub, _, complete):
        [end] = complete()
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                for control in (hub, end):
                    for call in (lambda c=control: c.send(b""), control.receive, control.wake):
                        with pytest.raises(RingError, match="fork"):
                            call()
                    control.close()
                assert end._sock.fileno() == -1
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        end.send(b"parent")
        assert collect(hub, 1) == [b"1:parent"]


def test_the_address_of_an_interface(monkeypatch):
    monkeypatch.setenv("RINGLET_IFACE", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("RINGLET_IFACE", "nosuchif0")
    with pytest.raises(RingError, match="RINGLET_IFACE=nosuchif0"):
        own_address()


def test_a_wake_up_in_the_middle_of_another_is_not_lost():
    class Drained:
        """The receiving end of the wake-up pipe; something wakes right before it is drained."""

        def __init__(self, sock, wake):
            self.sock, self.wakes = sock, [wake]

        def fileno(self):
            return self.sock.fileno()

        def recv(self, size):
            if self.wakes:
                self.wakes.pop()()
            return self.sock.recv(size)

        def close(self):
            self.sock.close()

    own, other = socket.socketpair()
    with own, other:
        control = TcpControl(own, 1, 2)
        control._woken = Drained(control._woken, control.wake)
        control.wake()
        assert control.receive(60.0) == []
        control.wake()
        start = time.monotonic()
        assert control.receive(60.0) == []
        assert time.monotonic() - start < 30.0
        other.close()
        control.close()
