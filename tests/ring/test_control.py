"""The control plane: order, wake-ups, partings, failures, and strangers at the listener."""

import os
import resource
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty

import pytest

from ringlet.ring import Communicator, PeerLost, RingError
from ringlet.ring.control import frame_kinds as control_frames
from ringlet.ring.control import hub as control_hub
from ringlet.ring.control import opening as control_open
from ringlet.ring.control.client import TcpControl
from ringlet.ring.control.frame_kinds import KINDS, LIMIT, MESSAGES, READY, pack, unpack
from ringlet.ring.control.hub import TcpHub
from ringlet.ring.control.in_process import Inbox, LocalControl
from ringlet.ring.control.opening import join, open_control
from ringlet.ring.transports.local import LocalWorld, run_local
from ringlet.ring.wire import admission
from ringlet.ring.wire.addresses import listen, own_address
from ringlet.ring.wire.framing import Incoming, Outgoing
from ringlet.ring.wire.handshake import (
    GREETING,
    MAGIC,
    REFUSED,
    Claim,
    Keys,
    Listening,
    Unwelcome,
    claim_from,
    connect_as,
)

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
        control.send(b"x")
        with pytest.raises(PeerLost, match="rank 0, the coordinator, failed with KeyError"):
            control.receive(WAIT)

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


def test_the_key_does_not_travel(monkeypatch):
    monkeypatch.setenv("RINGLET_SECRET", SECRET.hex())
    told, used = [], []

    def connected(where, secret, *args):
        used.append(secret)
        return join(where, secret, *args)

    monkeypatch.setattr(control_open, "join", connected)

    def work(comm):
        own = Wrapped(comm)
        for method in ("allgather", "broadcast"):
            real = getattr(own, method)

            def heard(array, *args, real=real):
                real(array, *args)
                told.append(array.tobytes())

            setattr(own, method, heard)
        control = open_control(own, Echo() if comm.rank == 0 else None)
        if comm.rank:
            control.send(b"x")
        assert collect(control, 1) == [b"1:x"]
        comm.barrier()
        control.close()

    run_local(work, 2)
    assert len(used) == 1
    assert told
    assert not any(secret in data for secret in (used[0], SECRET) for data in told)


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


def greeted(where, source="127.0.0.1"):
    """Connect as a stranger and return the socket with the hub's nonce."""
    sock = socket.create_connection(where, timeout=WAIT, source_address=(source, 0))
    greeting = b""
    while len(greeting) < GREETING:
        greeting += sock.recv(GREETING - len(greeting))
    assert greeting.startswith(MAGIC)
    return sock, greeting


def ended(sock):
    """Return whether the hub closed the connection and said no more than that it refuses."""
    said = b""
    try:
        while data := sock.recv(100):
            said += data
        return said in (b"", REFUSED)
    except ConnectionResetError:
        return True
    finally:
        sock.close()


def test_strangers_are_dropped_and_the_service_goes_on(monkeypatch):
    monkeypatch.setattr(control_hub, "HANDSHAKE", WAIT)
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        # A wrong key, both ways round: the hub drops it, and join says why.
        sock, _ = greeted(where)
        sock.sendall(struct.pack("<BII", 0, 2, 3) + bytes(64))
        assert ended(sock)
        # A hello that was good for another connection.
        recorder = Recorder(where)
        with pytest.raises(Unwelcome, match="does not take this process for one of the job's"):
            prove(recorder, 7, 3)
        sock, _ = greeted(where)
        sock.sendall(recorder.sent)
        assert ended(sock)
        # Random bytes, an HTTP request, a 4 GiB length, more than was asked for.
        for garbage in (os.urandom(73), b"GET / HTTP/1.1\r\n" * 5, b"\xff" * 73, bytes(100_000)):
            sock, _ = greeted(where)
            with suppress(OSError):
                sock.sendall(garbage)
            assert ended(sock)
        # One that sends too slowly, and one that says nothing: dropped when their time is up.
        hub._admission._patience = 0.3
        slow, _ = greeted(where)
        slow.sendall(b"x")
        silent, _ = greeted(where)
        assert ended(slow)
        assert ended(silent)
        hub._admission._patience = WAIT
        with pytest.raises(PeerLost, match="could not join the control plane"):
            join(where, bytes(32), 2, 3, timeout=0.2)
        two = join_in_thread(where, 2, 3)
        [one] = complete()
        two = two()
        two.send(b"hello")
        assert collect(hub, 1) == collect(one, 1) == collect(two, 1) == [b"2:hello"]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(where, timeout=WAIT)
        assert handler.lost == []
        two.close()


@pytest.mark.parametrize("source", ["127.9.9.9", "127.9.9.{}"], ids=["one address", "many"])
def test_a_flood_of_silent_strangers_keeps_no_rank_out(monkeypatch, source):
    monkeypatch.setattr(control_hub, "HANDSHAKE", WAIT)  # which this rank may take as well
    with star(2, Echo(), ranks=[]) as (_, where, complete):
        rank, greeting = greeted(where)
        strangers = [greeted(where, source.format(n + 1))[0] for n in range(100)]
        claim, welcome, _ = claim_from(greeting, SECRET, Claim(0, 1, 2))
        rank.sendall(claim)
        assert rank.recv(len(welcome), socket.MSG_WAITALL) == welcome
        complete()
        for sock in (rank, *strangers):
            sock.close()


def prove(sock, rank, size):
    return connect_as(sock, SECRET, Claim(0, rank, size), time.monotonic() + WAIT)


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
    """Join as a rank that then does what it likes with its socket; return that and its keys."""
    sock = socket.create_connection(where, timeout=WAIT)
    return sock, prove(sock, rank, size)


def changed(frames):
    """A frame whose last byte somebody has changed."""
    data = frames.frame(MESSAGES, pack([b"pay 1"]))
    return data[:-1] + b"9"


def repeated(frames):
    return frames.frame(MESSAGES, b"") * 2


def left_out(frames):
    frames.frame(MESSAGES, pack([b"the first"]))
    return frames.frame(MESSAGES, pack([b"the second"]))


@pytest.mark.parametrize(
    "evil",
    [
        lambda _: struct.pack("<IB", (1 << 32) - 1, MESSAGES) + bytes(16),
        lambda frames: frames.frame(77, b"x"),
        lambda _: b"\xff" * 1000,
        lambda frames: frames.frame(MESSAGES, b"\xff\xff\xff\xffx"),
        lambda frames: frames.frame(MESSAGES, b"xxx"),
        changed,
        repeated,
        left_out,
    ],
    ids=[
        "4 GiB",
        "unknown kind",
        "garbage",
        "too long",
        "too short",
        "changed",
        "twice",
        "missing",
    ],
)
def test_a_member_that_breaks_the_protocol_is_lost_and_the_others_go_on(evil):
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        sock, keys = raw_member(where, 2, 3)
        [one] = complete()
        sock.sendall(evil(Outgoing(keys.sending)))
        assert collect(hub, 1) == collect(one, 1) == [b"lost 2"]
        one.send(b"on we go")
        assert collect(hub, 1) == [b"1:on we go"]
        sock.close()


def test_why_a_member_cannot_be_believed_is_told():
    class Why(Echo):
        def on_lost(self, rank, why=""):
            return [f"lost {rank}: {why}".encode()]

    with star(2, Why(), ranks=[]) as (hub, where, complete):
        sock, keys = raw_member(where, 1, 2)
        complete()
        sock.sendall(changed(Outgoing(keys.sending)))
        why = b"a frame was changed, repeated or left out on its way"
        assert collect(hub, 1) == [b"lost 1: " + why]
        sock.close()


def test_a_reader_that_does_not_read_blocks_nobody(monkeypatch):
    monkeypatch.setattr(control_hub, "BACKLOG", 24 << 20)
    handler = Echo()
    with star(3, handler, ranks=[1]) as (hub, where, complete):
        sock, _ = raw_member(where, 2, 3)
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
        sock, keys = raw_member(where, 1, 2)
        complete()
        megabyte = bytes(1 << 20)
        for _ in range(20):
            hub.send(megabyte)
        frames, heard = Incoming(keys.receiving, KINDS, LIMIT), []
        while len(heard) < 21:
            data = sock.recv(1 << 16)
            assert data
            heard += frames.feed(data)
        assert heard[0] == (READY, b"")
        messages = [[*unpack(body)] for kind, body in heard[1:] if kind == MESSAGES]
        assert messages == [[b"0:" + megabyte]] * 20
        sock.close()


def test_without_a_descriptor_the_hub_waits_for_one_in_peace(monkeypatch):
    """Who connects stays ready to be accepted: it would be asked again and again."""
    steps, step = [], TcpHub._step
    monkeypatch.setattr(TcpHub, "_step", lambda self, left: (steps.append(0), step(self, left)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock, star(2, Echo(), ()) as (hub, where, complete):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # those that are open stay
        try:
            sock.connect(where)
            steps.clear()
            began = time.monotonic()
            while len(steps) <= 16 and time.monotonic() < began + WAIT:
                time.sleep(0.01)
            took = time.monotonic() - began
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        connect_as(sock, SECRET, Claim(0, 1, 2), time.monotonic() + WAIT)
        complete()
        assert 0.55 < took < WAIT
        assert hub._peers.keys() == {1}


def test_one_rank_cannot_join_twice_and_a_missing_rank_is_named():
    with star(3, Echo(), ranks=[]) as (hub, where, _):
        first, _ = raw_member(where, 1, 3)
        second = socket.create_connection(where, timeout=WAIT)
        with pytest.raises(Unwelcome):
            prove(second, 1, 3)
        with pytest.raises(PeerLost, match="rank 2 did not join") as caught:
            hub.wait_open(0.05)
        assert caught.value.ranks == (2,)
        first.close()
        second.close()


def test_who_is_lost_before_it_has_joined_is_named_at_once():
    """By the heartbeat, or by the end of another connection; not when the time is up."""
    with star(3, Echo(), ranks=[]) as (hub, _, _):
        with pytest.raises(PeerLost, match=r"^rank 2 did not join .*: the connection") as caught:
            hub.wait_open(WAIT, lambda: [2])
        assert caught.value.ranks == (2,)
        hub.lose(1, "no sign of life for 1 s")
        with pytest.raises(PeerLost, match=r"^rank 1 did not join .*: no sign of life") as caught:
            hub.wait_open(WAIT)
        assert caught.value.ranks == (1,)


def test_who_has_said_who_it_is_waits_for_the_answer(monkeypatch):
    """The hub counts it as come: who gave up, as packets were lost, and came anew was lost."""
    monkeypatch.setattr(control_open, "HANDSHAKE", 0.1)
    listener = listen("127.0.0.1")
    again = []

    class Slow(Listening):
        def answer(self, claim, secret_of):
            again.extend(select.select([listener], [], [], 1.0)[0])
            return super().answer(claim, secret_of)

    monkeypatch.setattr(admission, "Listening", Slow)
    hub = TcpHub(Echo(), 2, SECRET, listener)
    try:
        one = join(listener.getsockname()[:2], SECRET, 1, 2, WAIT)
        hub.wait_open(WAIT)
        assert again == []
        one.close()
    finally:
        hub.close()


def test_those_who_wait_for_others_to_join_hear_that_rank_0_gives_up():
    listener = listen("127.0.0.1")
    hub, told = TcpHub(Echo(), 3, SECRET, listener), []
    where = listener.getsockname()[:2]

    def enter():
        with pytest.raises(PeerLost, match="rank 0's error says which are missing") as caught:
            join(where, SECRET, 1, 3, WAIT)
        told.append(caught.value.ranks)

    thread = threading.Thread(target=enter)
    thread.start()
    deadline = time.monotonic() + WAIT
    while not hub._peers and time.monotonic() < deadline:
        time.sleep(0.001)
    hub.close()
    thread.join(WAIT)
    assert told == [()]  # rank 0 lives, and is not to be ended
    with pytest.raises(PeerLost, match="the connection to 0 has ended") as caught:
        join(where, SECRET, 1, 3, WAIT, lambda: [0])
    assert caught.value.ranks == (0,)


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
        control = TcpControl(own, Keys(SECRET, SECRET), 1, 2)
        control._woken = Drained(control._woken, control.wake)
        control.wake()
        assert control.receive(60.0) == []
        control.wake()
        start = time.monotonic()
        assert control.receive(60.0) == []
        assert time.monotonic() - start < 30.0
        other.close()
        control.close()


@pytest.mark.parametrize("how", ["wakes", "raises"])
def test_a_signals_handler_in_the_midst_of_a_wake_up_loses_none(how):
    with star(2, Echo()) as (_, _, complete):
        (control,) = complete()
        waker, handled = control._waker, []

        class Interrupted:
            def send(self, data):
                if not handled:
                    handled.append(how)
                    if how == "raises":
                        raise KeyboardInterrupt
                    control.wake()
                    assert control.receive(WAIT) == []
                return waker.send(data)

        control._waker = Interrupted()
        if how == "raises":
            with pytest.raises(KeyboardInterrupt):
                control.wake()
        began = time.monotonic()
        control.wake()
        assert control.receive(WAIT) == []
        assert time.monotonic() - began < WAIT / 2
        control._waker = waker


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_what_was_said_before_the_end_is_taken_though_time_was_up_before_both(timeout):
    inbox, error = Inbox(), PeerLost("rank 0 gave up", [0])
    real = inbox._queue

    class Late:
        """Time is up; then, before the reader goes on, rank 0 says a last word and is gone."""

        def get(self, timeout):
            inbox._queue = real
            inbox.put([b"why"])
            inbox.fail(error)
            raise Empty

    inbox._queue = Late()
    assert inbox.take(timeout) == [b"why"]
    with pytest.raises(PeerLost, match="gave up"):
        inbox.take(timeout)


def test_a_finaliser_may_wake_the_rank_whose_inbox_is_being_filled():
    """Python may run a finaliser wherever it allocates, on the thread that puts messages too."""
    inbox = Inbox()

    def messages():
        inbox.wake()
        yield b"x"

    def fill_and_read():
        inbox.put(messages())
        read.extend(inbox.take(0))
        inbox.take(0)  # the wake-up, if it is still to come
        read.extend(inbox.take(0.01))

    read = []
    thread = threading.Thread(target=fill_and_read, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert read == [b"x"]


def test_no_wake_up_is_lost_among_those_of_many_threads():
    inbox, rounds, seen = Inbox(), 2000, [0, 0, 0]

    def write(writer):
        for i in range(rounds):
            seen[writer] = i + 1
            inbox.wake()

    threads = [threading.Thread(target=write, args=(w,), daemon=True) for w in range(3)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    while seen != [rounds] * 3:
        assert inbox.take(WAIT) == []
        assert time.monotonic() - start < WAIT
    for thread in threads:
        thread.join(WAIT)


def test_rank_0_hears_last(monkeypatch):
    """It may leave because of what it hears, and would take the others' word with it."""
    listener = listen("127.0.0.1")
    hub = TcpHub(Echo(), 2, SECRET, listener)
    end = join(listener.getsockname()[:2], SECRET, 1, 2, WAIT)
    hub.wait_open(WAIT)
    heard, put = [], hub._inbox.put

    def look(messages):
        heard.extend(end.receive(WAIT))
        put(messages)

    monkeypatch.setattr(hub._inbox, "put", look)
    hub.send(b"leave")
    assert heard == hub.receive(WAIT) == [b"0:leave"]
    end.close()
    hub.close()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("sending", [True, False])
def test_the_end_of_rank_0_has_one_text_however_it_shows(monkeypatch, reset, sending):
    listener = listen("127.0.0.1")
    where = listener.getsockname()[:2]
    hub = TcpHub(Echo(), 2, SECRET, listener)
    end = join(where, SECRET, 1, 2, WAIT)
    hub.wait_open(WAIT)
    if reset:
        for peer in hub._peers.values():
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    monkeypatch.setattr(hub, "_part", lambda: None)
    hub.close()  # without a goodbye, as if its process had been killed
    text = "rank 0, the coordinator, is gone: its connection closed without a goodbye"

    def talk():
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            if sending:
                end.send(b"x" * 100_000)  # raises nothing: what rank 0 has said is read first
            end.receive(0.1)

    with pytest.raises(PeerLost) as caught:
        talk()
    assert (str(caught.value), caught.value.ranks) == (text, (0,))
    end.close()
