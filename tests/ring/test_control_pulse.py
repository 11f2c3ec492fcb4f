"""Heartbeats: frozen ranks are named, busy ones are not, and nobody waits for ever."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringlet.ring.communicator import Communicator
from ringlet.ring.control import heartbeat
from ringlet.ring.control import pulse as control_pulse
from ringlet.ring.control.client import TcpControl
from ringlet.ring.control.heartbeat import RANK
from ringlet.ring.control.hub import TcpHub
from ringlet.ring.control.opening import open_control
from ringlet.ring.control.pulse import Pulse, seconds_from
from ringlet.ring.errors import RingError
from ringlet.ring.interrupt import watched
from ringlet.ring.launch import start
from ringlet.ring.processes.processes import children_of
from ringlet.ring.transports.local import run_local
from ringlet.ring.wire import admission
from ringlet.ring.wire.addresses import listen
from ringlet.ring.wire.framing import OVERHEAD
from ringlet.ring.wire.handshake import CLAIM, GREETING, WELCOME, Claim, claim_from, connect_as

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_pulse.py")
SECRET = bytes(32)
WAIT = 60.0
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
gloo = pytest.param("gloo", marks=pytest.mark.skipif(not HAS_TORCH, reason="needs torch"))
mpi = pytest.param(
    "mpi",
    marks=[pytest.mark.mpi, pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")],
)


def test_the_limit_is_read_from_the_environment() -> None:
    assert seconds_from({}) == control_pulse.DEFAULT
    assert seconds_from({"RINGLET_HEARTBEAT": "2.5"}) == 2.5
    assert seconds_from({"RINGLET_HEARTBEAT": "0"}) == 0
    for text in ("", "-1", "soon", "inf", "nan"):
        with pytest.raises(ValueError, match="RINGLET_HEARTBEAT="):
            seconds_from({"RINGLET_HEARTBEAT": text})


class Beats:
    """A heartbeat of rank ``rank``, whose parent is this process unless it is said otherwise."""

    def __init__(self, rank: int, size: int, door: Sequence[str | int], **other: Any) -> None:
        given = {"parent": os.getpid(), "seconds": 1.0, "secret": SECRET.hex(), "timeout": WAIT}
        given |= other
        words = [rank, size, *given.values(), *door]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(control_pulse.PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[int(door[0])] if rank == 0 else [],
            bufsize=0,
        )
        self.say(" ".join(map(str, words)).encode() + b"\n")

    def say(self, words: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words)

    def hear(self) -> str:
        """Return the next line that it tells; nothing at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def beats() -> Iterator[Callable[..., list[Beats]]]:
    """Return a function that starts heartbeats which know each other; they are ended."""
    started: list[Beats] = []
    with ExitStack() as stack:

        def start(size: int, **of_rank: dict[str, Any]) -> list[Beats]:
            listener = stack.enter_context(listen("127.0.0.1"))
            where = listener.getsockname()[:2]
            for rank in range(size):
                door = where if rank else (listener.fileno(),)
                beat = Beats(rank, size, door, **of_rank.get(f"r{rank}", {}))
                started.append(beat)
                stack.callback(beat.end)
            return started

        yield start


Start = Callable[..., list[Beats]]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_heartbeat_that_is_silent_is_told_to_all(beats: Start, victim: int) -> None:
    """As when its host has vanished: nothing ends its connections."""
    found = beats(3)
    joined(found)
    os.kill(found[victim].process.pid, signal.SIGSTOP)
    others = [beat for rank, beat in enumerate(found) if rank != victim]
    assert [beat.hear() for beat in others] == [f"silent {victim}"] * 2


@pytest.mark.parametrize("stall", [0.68, 60.0])
def test_nobody_is_silent_while_the_heartbeat_that_listens_stands_still(
    monkeypatch: pytest.MonkeyPatch, stall: float
) -> None:
    """Where a host stood still for 0.9 s, one of its ranks was named: it was as silent as all."""
    now, told, stalls = [100.0], list[str](), [0.0, stall, 0.0]

    def poll(milliseconds: float) -> list[tuple[int, int]]:
        if not stalls:
            raise InterruptedError
        now[0] += milliseconds / 1000 + stalls.pop(0)
        return []

    with listen("127.0.0.1") as listener, monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        line = f"0 2 {os.getppid()} 1 {SECRET.hex()} {WAIT} {os.dup(listener.fileno())}"
        hub = heartbeat.Hub(heartbeat.WatchedRank(line))
        sock = SimpleNamespace(fileno=lambda: -1, close=lambda: None)
        hub.links[1] = cast(
            heartbeat.BeatLink, SimpleNamespace(sock=sock, heard=now[0], send=lambda *_: None)
        )
        patch.setattr(hub, "poll", SimpleNamespace(poll=poll, unregister=lambda _: None))
        patch.setattr(hub, "tell", lambda *words: told.append(words))
        with closing(hub.admission), suppress(InterruptedError):
            hub.run()
        if hub.ended >= 0:
            os.close(hub.ended)
    assert not told
    assert not stalls


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be told so")
def test_lost_beats_are_sent_again_without_ever_longer_waits() -> None:
    """Else three that are lost in a row make five seconds of silence, where answers are slow."""
    with listen("127.0.0.1") as listener:
        of_rank = [f"{rank} 2 {os.getppid()} 5 {SECRET.hex()} {WAIT}" for rank in range(2)]
        host, port = listener.getsockname()[:2]
        spoke = heartbeat.Spoke(heartbeat.WatchedRank(f"{of_rank[1]} {host} {port}"))
        own = os.dup(listener.fileno())
        hub = heartbeat.Hub(heartbeat.WatchedRank(f"{of_rank[0]} {own}"))
        with ThreadPoolExecutor(1) as pool:
            connected = pool.submit(spoke.connect)
            while not hub.links:
                hub.serve({fd for fd, _ in hub.poll.poll(100)})
            link = connected.result(WAIT)
        assert link is not None
        for sock in (link.sock, hub.links[1].sock):
            assert sock.getsockopt(socket.IPPROTO_TCP, heartbeat.RESENDING[0][0]) == 1
            sock.close()


def joined(found: Sequence[Beats]) -> None:
    """Return once all heartbeats have found each other."""
    assert {beat.hear() for beat in found} == {"joined"}


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_stops_or_ends_is_told_though_its_heartbeat_lives(
    tmp_path: Path, beats: Start, victim: int, how: signal.Signals
) -> None:
    script = (
        "import subprocess, sys, os\n"
        "command, words, pid, *fds = sys.argv[1:]\n"
        "os.dup2(int(fds[0]), 0)\n"
        "process = subprocess.Popen([sys.executable, '-I', '-S', command], stdin=subprocess.PIPE,"
        " pass_fds=[int(fd) for fd in fds[1:]])\n"
        "process.stdin.write(words.replace('PARENT', str(os.getpid())).encode() + b'\\n')\n"
        "process.stdin.flush()\n"
        "os.read(0, 1)\n"
    )
    listener = listen("127.0.0.1")
    where = listener.getsockname()[:2]
    child, ours = os.pipe()
    door = where if victim else (listener.fileno(),)
    words = " ".join(map(str, (victim, 2, "PARENT", 1.0, SECRET.hex(), WAIT, *door)))
    fds = [child] if victim else [child, listener.fileno()]
    told, tells = os.pipe()
    rank = subprocess.Popen(
        [sys.executable, "-c", script, str(control_pulse.PROGRAM), words, "0", *map(str, fds)],
        pass_fds=fds,
        stdout=tells,
    )
    other = Beats(1 - victim, 2, where if victim == 0 else (listener.fileno(),))
    try:
        os.close(tells)
        joined([other])
        os.kill(rank.pid, how)
        assert other.hear() == f"{'silent' if how is signal.SIGSTOP else 'gone'} {victim}"
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
        # Its heartbeat has ended with it: nobody has the other end of its output any more.
        while os.read(told, 100):
            pass
    finally:
        rank.kill()
        rank.wait()
        other.end()
        for fd in (child, ours, told):
            os.close(fd)
        listener.close()


def test_leaving_politely_is_told_to_nobody_but_by_rank_0(beats: Start) -> None:
    found = beats(3)
    joined(found)
    found[1].say(b"bye")
    assert found[1].hear() == ""
    assert found[1].process.wait(WAIT) == 0
    found[0].say(b"bye")
    assert found[0].hear() == ""
    assert [found[2].hear() for _ in range(2)] == ["bye", ""]


def test_a_rank_that_comes_when_rank_0_has_left_is_told_so() -> None:
    with ExitStack() as stack:
        with listen("127.0.0.1") as listener:
            port = listener.getsockname()[1]
            late = Beats(1, 3, ["127.0.0.1", port])
            stack.callback(late.end)
            assert select.select([listener], [], [], WAIT)[0]  # it waits to be let in
            first = Beats(0, 3, [listener.fileno()])
            stack.callback(first.end)
            first.say(b"bye")  # as a program does that ends at once
        assert [late.hear() for _ in range(3)] == ["joined", "bye", ""]
        assert first.process.wait(WAIT) == 0  # although rank 2 never comes
        later = Beats(2, 3, ["127.0.0.1", port])
        stack.callback(later.end)
        assert later.hear() == ""
        assert later.process.wait(WAIT) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_heartbeat_ends_with_its_rank_whoever_holds_its_pipes(beats: Start, rank: int) -> None:
    victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    found = beats(2, **{f"r{rank}": {"parent": victim.pid}})  # which it is not: it has gone
    while (line := found[rank].hear()) == "joined":
        pass
    assert line == ""
    assert found[rank].process.wait(WAIT) == 0
    victim.kill()
    victim.wait()
    assert victim.stdin is not None
    victim.stdin.close()


def test_strangers_are_sent_away_and_the_job_goes_on(beats: Start) -> None:
    listener = listen("127.0.0.1")
    where = listener.getsockname()[:2]
    hub = Beats(0, 2, (listener.fileno(),))
    liar = Beats(1, 2, where, secret=bytes(31).hex() + "01", timeout=3.0)
    with ExitStack() as stack:
        stack.callback(hub.end)
        stack.callback(liar.end)
        idle = [stack.enter_context(socket.create_connection(where)) for _ in range(80)]
        for sock in idle[::2]:
            with suppress(OSError):
                sock.sendall(os.urandom(200))
        assert liar.process.wait(WAIT) == 0
        rank = Beats(1, 2, where)
        stack.callback(rank.end)
        joined([hub, rank])
        os.kill(rank.process.pid, signal.SIGSTOP)
        assert hub.hear() == "silent 1"
    listener.close()


@pytest.mark.parametrize("source", ["127.9.9.9", "127.9.9.{}"], ids=["one address", "many"])
def test_a_flood_of_silent_strangers_keeps_no_heartbeat_out(source: str) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1"))
        where = listener.getsockname()[:2]
        hub = Beats(0, 2, (listener.fileno(),))
        stack.callback(hub.end)
        rank = stack.enter_context(socket.create_connection(where))
        greeting = rank.recv(GREETING, socket.MSG_WAITALL)
        for number in range(100):
            own = (source.format(number + 1), 0)
            stranger = socket.create_connection(where, source_address=own)
            stack.enter_context(stranger)
            assert len(stranger.recv(GREETING, socket.MSG_WAITALL)) == GREETING
        claim, welcome, _ = claim_from(greeting, SECRET, Claim(0, 1, 2))
        rank.sendall(claim)
        assert rank.recv(WELCOME, socket.MSG_WAITALL) == welcome
        assert hub.hear() == "joined"


def test_a_heartbeat_that_cannot_join_in_time_joins_later() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1"))
        rank = Beats(1, 2, listener.getsockname()[:2], timeout=0.1)
        stack.callback(rank.end)
        listener.settimeout(10.0)
        began, tries = time.monotonic(), 0
        while tries < 3 or time.monotonic() < began + 0.5:
            listener.accept()[0].close()
            tries += 1
        hub = Beats(0, 2, (listener.fileno(),))
        stack.callback(hub.end)
        joined([rank, hub])
        os.kill(rank.process.pid, signal.SIGSTOP)
        assert hub.hear() == "silent 1"


def test_a_heartbeat_that_still_tries_to_join_ends_when_its_rank_leaves() -> None:
    with listen("127.0.0.1") as listener:
        rank = Beats(1, 2, listener.getsockname()[:2], timeout=0.0)
        listener.accept()[0].close()
        rank.say(b"bye")
        assert rank.process.wait(WAIT) == 0
        rank.end()


def test_it_is_told_that_a_heartbeat_has_not_joined_in_time_and_when_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ringlet")
    code = "import sys; input(); print('joined', flush=True); sys.stdin.read(3)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    pulse = Pulse(process, 1, 1.0, lambda *_: None, lambda: 0, None)
    pulse.wait_joined(0.05)
    (told,) = caplog.messages
    assert "the heartbeat of rank 1 has not reached rank 0's in 0.05 s" in told
    assert "goes on trying" in told
    assert process.stdin is not None
    process.stdin.write(b"now\n")
    limit = time.monotonic() + WAIT
    while len(caplog.messages) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert caplog.messages[1:] == ["the heartbeat of rank 1 has reached rank 0's now"]
    pulse.close()


def test_ranks_get_in_though_strangers_have_taken_all_descriptors(beats: Start) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1"))
        where = listener.getsockname()[:2]
        hub = Beats(0, 2, (listener.fileno(),))
        stack.callback(hub.end)
        resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, (24, 24))
        for _ in range(40):
            stack.enter_context(socket.create_connection(where))
        rank = stack.enter_context(socket.create_connection(where))
        # Strangers may be silent for longer than that.
        limit = time.monotonic() + 0.8 * heartbeat.HANDSHAKE
        connect_as(rank, SECRET, Claim(0, 1, 2), limit)
        assert hub.hear() == "joined"


def test_without_a_descriptor_a_heartbeat_waits_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as listener, socket.create_connection(listener.getsockname()[:2]):
        line = f"0 2 {os.getppid()} 5 {SECRET.hex()} {WAIT} {os.dup(listener.fileno())}"
        hub = heartbeat.Hub(heartbeat.WatchedRank(line))

        def short() -> tuple[socket.socket, str]:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(admission, "PAUSE", 0.05)
        door, own = hub.admission.fileno(), hub.admission._listener
        with closing(hub.admission):
            hub.poll.unregister(0)
            assert [fd for fd, _ in hub.poll.poll(1e3 * WAIT)] == [door]
            with monkeypatch.context() as patch:
                without = SimpleNamespace(accept=short, fileno=own.fileno)
                patch.setattr(hub.admission, "_listener", without)
                hub.serve({door})
            assert hub.poll.poll(0) == []  # it would be asked again and again
            time.sleep(0.06)
            hub.serve(set())
            assert len(hub.admission) == 1  # who waited is in
        if hub.ended >= 0:
            os.close(hub.ended)


def test_a_stranger_that_speaks_as_the_last_rank_comes_does_no_harm() -> None:
    """Both are heard in one turn: the rank first, and with that the stranger is sent away."""
    listener = listen("127.0.0.1")
    where = listener.getsockname()[:2]
    hub = Beats(0, 2, (listener.fileno(),))
    with ExitStack() as stack:
        stack.callback(listener.close)
        stack.callback(hub.end)
        rank, stranger = (stack.enter_context(socket.create_connection(where)) for _ in range(2))
        greetings = [sock.recv(GREETING, socket.MSG_WAITALL) for sock in (rank, stranger)]
        os.kill(hub.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, hub.process.pid, os.WSTOPPED | os.WNOWAIT)
        claim, welcome, _ = claim_from(greetings[0], SECRET, Claim(0, 1, 2))
        rank.sendall(claim)
        stranger.sendall(b"?")
        os.kill(hub.process.pid, signal.SIGCONT)
        assert rank.recv(WELCOME, socket.MSG_WAITALL) == welcome
        assert hub.hear() == "joined"
        assert hub.hear() == "silent 1"  # it has not ended


@pytest.mark.parametrize("how", ["changed", "repeated", "reflected"])
def test_a_relay_cannot_change_repeat_or_reflect_beats(how: str) -> None:
    """Else a rank would count as alive, or as lost, on a stranger's word."""
    record = OVERHEAD + RANK.size
    with ExitStack() as stack:
        listener, relay = (stack.enter_context(listen("127.0.0.1")) for _ in range(2))
        for beat in (
            Beats(0, 2, (listener.fileno(),), seconds=60.0),
            Beats(1, 2, relay.getsockname()[:2], seconds=60.0),
        ):
            stack.callback(beat.end)
        rank = stack.enter_context(relay.accept()[0])
        hub = stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
        for source, to, nbytes in ((hub, rank, GREETING), (rank, hub, CLAIM), (hub, rank, WELCOME)):
            to.sendall(source.recv(nbytes, socket.MSG_WAITALL))
        beat = (hub if how == "reflected" else rank).recv(record, socket.MSG_WAITALL)
        if how == "changed":
            beat = bytes([beat[0], beat[1], beat[2], beat[3], heartbeat.GONE]) + beat[5:]
        hub.settimeout(WAIT)
        hub.sendall(beat * 2 if how == "repeated" else beat)
        with suppress(ConnectionResetError):
            while hub.recv(100):  # its own beats, until it has hung up
                pass


class Echo:
    """Broadcasts what it hears; nobody is lost."""

    def on_message(self, rank: int, message: bytes) -> list[bytes]:
        return [message]

    def on_lost(self, rank: int, why: str = "") -> list[bytes]:
        raise AssertionError(f"rank {rank} was lost: {why}")


class Wrapped(Communicator):
    """A local rank that does not look like one, so that its control plane is TCP."""

    name = "wrapped"

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        for method in ("allgather", "broadcast", "barrier", "close"):
            setattr(self, method, getattr(comm, method))


Wrapped.__abstractmethods__ = frozenset()


def test_both_planes_close_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGLET_HEARTBEAT", "1")
    before = set(children_of(os.getpid()))

    for first in range(3):

        def run(comm: Communicator, first: int = first) -> list[bytes]:
            control = open_control(Wrapped(comm), Echo() if comm.rank == 0 else None)
            assert isinstance(control, TcpHub | TcpControl)
            assert control.pulse is not None
            if comm.rank == first:
                control.send(b"hello")
            heard = control.receive(WAIT)
            comm.barrier()
            if comm.rank == first:
                control.close()
            comm.barrier()
            control.close()
            return heard

        assert run_local(run, 3) == [[b"hello"]] * 3
    ours = ("ringlet pulse", "ringlet control")  # the compressors' pool may have threads as well
    assert not [t for t in threading.enumerate() if t.name.startswith(ours)]
    assert set(children_of(os.getpid())) == before


def test_without_a_heartbeat_a_rank_is_not_looked_after_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    def run(comm: Communicator) -> list[bytes]:
        control = open_control(Wrapped(comm), Echo() if comm.rank == 0 else None)
        if comm.rank == 0:
            control.send(b"hello")
        heard = control.receive(WAIT)
        comm.barrier()
        control.close()
        return heard

    assert run_local(run, 2) == [[b"hello"]] * 2
    assert "rank 0 has no heartbeat: " in caplog.text


def test_without_heartbeats_and_with_odd_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> str:
        try:
            control = open_control(Wrapped(comm), Echo() if comm.rank == 0 else None)
        except (ValueError, RingError) as error:
            return str(error)
        assert isinstance(control, TcpHub | TcpControl)
        assert control.pulse is None
        comm.barrier()
        control.close()
        return ""

    monkeypatch.setenv("RINGLET_HEARTBEAT", "0")
    assert run_local(run, 2) == ["", ""]
    monkeypatch.setenv("RINGLET_HEARTBEAT", "soon")
    told = run_local(run, 2)
    assert "RINGLET_HEARTBEAT='soon'" in told[0]
    assert "rank 0 could not open" in told[1]


def test_beats_cost_next_to_nothing(beats: Start) -> None:
    found = beats(2, r0={"seconds": 5.0}, r1={"seconds": 5.0})
    joined(found)

    def spent() -> float:
        ticks = 0
        for beat in found:
            fields = Path(f"/proc/{beat.process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    begin, before = time.monotonic(), spent()
    assert not threading.Event().wait(3.0)
    assert spent() - before < 0.02 * (time.monotonic() - begin) + 0.02
    assert all(beat.process.poll() is None for beat in found)


def test_interrupting_ends_the_connections_of_a_block_and_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        with socket.create_connection(where) as other, listener.accept()[0] as other_end:
            with watched() as connections:
                own = socket.create_connection(where)
                own_end, _ = listener.accept()
            connections.interrupt()
            assert own.recv(1) == b""
            own.close()
            own_end.close()
            connections.interrupt()  # the descriptors may be somebody else's by now
            other.sendall(b"x")
            assert other_end.recv(1) == b"x"


def job(transport: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "ringlet", "run", "-np", "3", "--transport", transport, "--no-prefix"]
    try:
        return subprocess.run(
            [sys.executable, *command, sys.executable, str(WORKER), *arguments],
            env=os.environ | {"RINGLET_HEARTBEAT": "2"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = [(text or b"").decode(errors="replace") for text in (error.stdout, error.stderr)]
        raise AssertionError("\n".join([str(error), *said, *error.__notes__])) from None


Result = Callable[..., "subprocess.CompletedProcess[str]"]


# Two ranks would wait for the third at work, for MPI does not sleep: that of victim 0 is enough.
SPINNING = ("mpi", "2", "locked")


@pytest.fixture(scope="module")
def result() -> Iterator[Result]:
    """Return what a job came to. Several run at a time, most of which spend it waiting."""
    there = [name for name, known in (("gloo", HAS_TORCH), ("mpi", HAS_MPI)) if known]
    with ThreadPoolExecutor(4) as idlers, ThreadPoolExecutor(2) as reducers:
        jobs = {
            (transport, victim, *idle): (idlers if "idle" in idle else reducers).submit(
                job, transport, victim, *idle
            )
            for transport in there
            for idle in ((), ("idle",), ("idle", "group"), ("idle", "locked"), ("locked",))
            for victim in ("2", "0")
            if (transport, victim, *idle) != SPINNING
        }
        yield lambda *arguments: jobs[arguments].result(480)


@pytest.mark.parametrize("transport", [gloo, mpi])
@pytest.mark.parametrize("victim", [2, 0])
def test_a_frozen_rank_is_named_by_those_who_wait_for_messages(
    result: Result, transport: str, victim: int
) -> None:
    done = result(transport, str(victim), "idle")
    name = "rank 0, the coordinator," if victim == 0 else "rank 2"
    expected = ["freezing", *[f"{name} is gone: no sign of life for 2 s"] * 2]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert done.returncode == 75
    assert f"has lost another rank; still there: {victim}; ending the other ranks" in done.stderr


@pytest.mark.parametrize("transport", [gloo])
@pytest.mark.parametrize("victim", [2, 0])
def test_a_frozen_rank_is_named_by_those_who_are_in_a_collective(
    result: Result, transport: str, victim: int
) -> None:
    done = result(transport, str(victim))
    name = "rank 0, the coordinator," if victim == 0 else "rank 2"
    expected = ["freezing", *[f"{name} is gone: no sign of life for 2 s"] * 2]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert done.returncode == 75


@pytest.mark.parametrize("transport", [mpi])
@pytest.mark.parametrize("victim", [2, 0])
def test_mpi_does_not_wait_for_a_frozen_rank_for_ever(
    result: Result, transport: str, victim: int
) -> None:
    done = result(transport, str(victim))
    assert done.stdout == "freezing\n"
    assert done.returncode == 75
    assert f"ringlet: rank {victim} is gone: no sign of life for 2 s; a collective" in done.stderr


@pytest.mark.parametrize("transport", [gloo, mpi])
@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_is_stopped_with_its_process_group(
    result: Result, transport: str, victim: int
) -> None:
    done = result(transport, str(victim), "idle", "group")
    name = "rank 0, the coordinator," if victim == 0 else "rank 2"
    expected = ["freezing", *[f"{name} is gone: no sign of life for 2 s"] * 2]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@pytest.mark.parametrize(
    ("transport", "victim", "idle"),
    [
        *(pytest.param("gloo", victim, idle, marks=gloo.marks) for victim in (2, 0)
          for idle in (("idle",), ())),
        *(pytest.param("mpi", victim, ("idle",), marks=mpi.marks) for victim in (2, 0)),
        pytest.param("mpi", 0, (), marks=mpi.marks),
    ],
)  # fmt: skip
def test_a_rank_that_holds_the_interpreters_lock_is_not_lost(
    result: Result, transport: str, victim: int, idle: tuple[str, ...]
) -> None:
    done = result(transport, str(victim), *idle, "locked")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["all is well"] * 3 + ["locking"]
