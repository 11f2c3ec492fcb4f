"""The wrapper around one rank's program: ``python -m ringlet.ring.processes.rank_wrapper``.

It asks the launcher what to run, waits until all ranks may begin, runs it in a session of its own,
sends back what it prints and how it ends, and passes signals on. Whatever the program leaves behind
is ended before the launcher is told that the rank is done; if the launcher goes away, everything is
killed at once. Two arguments, if given, are descriptors: for a last word then, and of a pipe with a
byte for whoever may say it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ringlet.ring.awake_clock import AwakeClock
from ringlet.ring.errors import LaunchError, ProtocolError
from ringlet.ring.hosts.interfaces import network
from ringlet.ring.processes import processes
from ringlet.ring.processes.pmi import LONGEST, aborts, named_by, remove_segments
from ringlet.ring.processes.torchrun import meeting_place
from ringlet.ring.wire.addresses import split_port
from ringlet.ring.wire.entry import enter, expect
from ringlet.ring.wire.keys import STORE_KEY
from ringlet.ring.wire.launch_link import (
    ADDRESS,
    CHUNK,
    HIGH,
    SECRET,
    Channel,
    Kind,
    store_key,
)

LOOK = 0.2  # seconds between two looks whether a program that was stopped runs again
LEFTOVERS = 1.0  # seconds that processes outliving the program get to end by themselves
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GONE = 1.0  # seconds from the end of a launcher's connections to its own
_ALONE = (
    b"ringlet run: the launcher has ended without a word, such as by SIGKILL or for lack of "
    b"memory; all its ranks are killed. What was saved to files is left to start again from\n"
)
RANK_NAMES = ("RINGLET_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")


class Wrapper:
    """Runs one program; ``channel`` leads to the launcher, ``extra`` is for the environment."""

    launcher_lost: Sequence[int] = ()  # descriptors to say it by: the output, and the turn

    def __init__(
        self, channel: Channel, job: dict[str, Any], extra: dict[str, str], parent: int
    ) -> None:
        self._parent = parent
        self.channel = channel
        self.job = job
        self.extra = extra
        self.environment: dict[str, str] = {}  # of the program
        self.streams: dict[int, Kind] = {}
        self.pmi: socket.socket | None = None  # what MPI asks comes here
        self._line = b""  # that has not ended
        self._mpi_name = ""  # after which MPI names shared memory
        self.group = 0
        self.alone = True  # no child, not even an adopted one
        self.code: int | None = None
        self.clock = AwakeClock()  # what the program leaves may have stood still with this process
        self.deadline = 0.0
        self.done = False
        self._questioned = False  # whether the program runs
        self.wake, wake = socket.socketpair()
        self.wake.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake = wake  # keeps the descriptor open
        for number in (*PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup holds for the program too
                signal.signal(number, lambda *_: None)

    def prepare(self) -> None:
        """Find out about this host's network, and tell all ranks where rank 0 may listen."""
        inherited = {n: v for n, v in os.environ.items() if n not in self.job["drop"]}
        self.environment = inherited | self.job["env"] | self.extra
        own = self.channel.own_address
        try:
            self.environment |= network(self.job["interfaces"], own, self.environment)
            if self.job["leads"]:
                place = meeting_place(self.environment["RINGLET_ADDRESS"])
                self.channel.send(Kind.PLACE, json.dumps(place).encode())
        except LaunchError as error:
            self.channel.send(Kind.STDERR, f"{error}\n".encode())
            self._ended(1)

    def start(self, place: dict[str, str]) -> None:
        """Start the program, or report why it cannot be started as a shell would.

        ``place`` are variables that all ranks have agreed on; what the user has set stays.
        """
        environment = place | self.environment
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.job["local_size"])))
        me = os.getpid()
        given = self._for_mpi(environment)
        try:
            program = subprocess.Popen(
                self.job["command"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=given,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, me),
            )
        except (OSError, TypeError, ValueError) as error:  # the latter two of arguments
            missing = isinstance(error, FileNotFoundError)
            text = f"{self.job['command'][0]}: {getattr(error, 'strerror', error)}\n"
            self.channel.send(Kind.STDERR, text.encode(errors="surrogateescape"))
            self._ended(127 if missing else 126)
            return
        finally:
            if self.pmi is not None:
                os.close(*given)
        assert program.stdout is not None
        assert program.stderr is not None
        self._program = program
        self.group = program.pid
        self.alone = False
        for stream, kind in ((program.stdout, Kind.STDOUT), (program.stderr, Kind.STDERR)):
            os.set_blocking(stream.fileno(), False)
            self.streams[stream.fileno()] = kind
        self.channel.send(Kind.STARTED, b"%d" % program.pid)

    def _for_mpi(self, environment: dict[str, str]) -> list[int]:
        """Return the descriptors through which MPI asks its process manager, which may be us."""
        if not self.job["pmi"]:
            return [int(os.environ["PMI_FD"])] if os.environ.get("PMI_FD", "").isdecimal() else []
        self.pmi, end = socket.socketpair()
        self.pmi.setblocking(False)
        environment |= {
            "PMI_FD": str(end.fileno()),
            "PMI_RANK": environment["RINGLET_RANK"],
            "PMI_SIZE": environment["RINGLET_SIZE"],
        }
        return [end.detach()]

    def _ask(self) -> None:
        """Pass on what MPI asks, line by line."""
        if self.pmi is None:
            return
        try:
            data = self.pmi.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self.channel.send(Kind.PMI, line)
            if aborts(line):  # the program goes on otherwise, as if nothing were
                self._pass_on(signal.SIGKILL)
        if not data or len(self._line) > LONGEST:  # it has let go, or says nothing that makes sense
            self.pmi.close()
            self.pmi = None

    def run(self) -> int:
        """Serve until the launcher lets go; return this process's exit code."""
        if self._hear():  # what came together with the job
            return 0
        while True:
            over = self.code is not None and self.alone  # the wait sees all that was written
            ready = self._wait()
            for descriptor in [d for d in ready if d in self.streams]:
                self._relay(descriptor)
            self._ask()
            if self.wake.fileno() in ready:
                for number in self.wake.recv(4096):
                    if number != signal.SIGCHLD:
                        self._pass_on(number)
            self._collect()
            if self.channel.fileno() in ready:
                self.channel.flush()
                if self._hear():
                    return 0
                if self.channel.closed:
                    self.abandon()
                    return 1
            if self._questioned and (self.alone or not processes.is_stopped(self.group)):
                self._questioned = False
                self.channel.send(Kind.ALIVE)
            if over and not self.done:
                if self.channel.pending < HIGH and not any(d in ready for d in self.streams):
                    self.streams.clear()  # nobody is left who could write
                if not self.streams:
                    self.done = True
                    self._clear_up()
                    self.channel.send(Kind.DONE)

    def _hear(self) -> bool:
        """Do what the launcher has said; return whether that was to go."""
        for kind, body in self.channel.receive():
            if kind is Kind.SIGNAL:
                self._pass_on(int(body))
            elif kind is Kind.BEGIN and self.code is None:
                self.start(json.loads(body))
            elif kind is Kind.PMI and self.pmi is not None:
                self._mpi_name = named_by(body) or self._mpi_name
                with contextlib.suppress(OSError):  # it has ended: nobody waits for the answer
                    self.pmi.send(body)
            elif kind is Kind.ALIVE:
                self._questioned = True
            elif kind is Kind.RELEASE:
                return True
        return False

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        waiting = select.POLLOUT if self.channel.pending else 0
        poll.register(self.channel, select.POLLIN | waiting)
        if self.channel.pending < HIGH:
            for descriptor in self.streams:
                poll.register(descriptor, select.POLLIN)
            if self.pmi is not None:
                poll.register(self.pmi, select.POLLIN)
        timeout: float | None = 1000 * LOOK if self._questioned else None
        if self.code is not None and not self.alone:
            timeout = max(10.0, 1000 * self.clock.left(self.deadline))
        elif self.code is not None and not self.done and self.channel.pending < HIGH:
            timeout = 0
        self.clock.sleep(None if timeout is None else timeout / 1000)
        return {descriptor for descriptor, _ in poll.poll(timeout)}

    def _relay(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return
        if data:
            self.channel.send(self.streams[descriptor], data)
        else:
            del self.streams[descriptor]

    def _collect(self) -> None:
        """Reap whatever ended; kill what outlives the program for too long."""
        if self.alone:
            return
        ended = processes.reap()
        if ended and self.group in ended and self.code is None:
            self._program.returncode = ended[self.group]
            self._ended(ended[self.group])
        if self.code is None:
            return
        if ended is None or processes.reap() is None:
            self.alone = True
        elif self.clock.now() >= self.deadline:
            processes.kill_children()
            if self.clock.now() >= self.deadline + 5:  # stuck in the kernel: nothing helps
                self.alone = True

    def _ended(self, code: int) -> None:
        self._ask()  # what it has said last
        self.code = code
        self.deadline = self.clock.now() + LEFTOVERS
        now = time.monotonic_ns()
        self.channel.send(Kind.ENDED, b"%d %d %d" % (code, now, now))

    def _pass_on(self, number: int) -> None:
        if self.alone:
            if self.code is None:
                self._ended(-number)  # before the program could start
            return  # the id of the group may belong to somebody else by now
        processes.signal_group(self.group, number)
        if number == signal.SIGKILL:
            processes.kill_children()
            self.deadline = min(self.deadline, self.clock.now())

    def abandon(self) -> None:
        """Kill everything: the launcher is gone."""
        if not self.alone:
            processes.signal_group(self.group, signal.SIGKILL)
        limit = time.monotonic() + 5
        while not self.alone and processes.reap() is not None and time.monotonic() < limit:
            processes.kill_children()
            time.sleep(0.005)
        self._clear_up()
        self._say_launcher_lost()

    def _clear_up(self) -> None:
        if self._mpi_name:
            remove_segments(self._mpi_name)

    def _say_launcher_lost(self) -> None:
        """Say where the launcher spoke why all ends, unless another wrapper has."""
        if len(self.launcher_lost) != 2:
            return
        limit = time.monotonic() + GONE
        while os.getppid() == self._parent:  # its connections end before it does
            if time.monotonic() >= limit:
                return
            time.sleep(0.005)
        said, turn = self.launcher_lost
        with contextlib.suppress(OSError):
            if os.read(turn, 1):
                os.write(said, _ALONE)


def join(address: str, secret: bytes, rank: int) -> tuple[Channel, dict[str, Any]]:
    """Connect to the launcher, prove and have proved the secret; return link and job."""
    channel = enter(address, secret, rank)
    job: dict[str, Any] = json.loads(expect(channel, Kind.JOB))
    return channel, job


def _unreached(rank: int, address: str, error: Exception) -> str:
    """Say that the launcher at ``address`` was not reached, and what to look at."""
    text = f"rank {rank}, host {socket.gethostname()}: no connection to the launcher at {address}"
    if ipaddress.ip_address(split_port(address)[0].partition("%")[0]).is_loopback:
        return f"{text}: {error}"
    return (
        f"{text}: {error}. A firewall may stand between, or another network lead there: name its"
        " --network-interface"
    )


def _say(text: str) -> None:
    """Print a line at once, end and all: other ranks' wrappers share the standard error."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run this rank's program; the environment says where the launcher is."""
    parent = os.getppid()
    processes.die_with_parent(signal.SIGTERM, parent)
    processes.adopt_orphans()
    secret = bytes.fromhex(os.environ.pop(SECRET))
    rank = next(int(os.environ[name]) for name in RANK_NAMES if name in os.environ)
    address = os.environ.pop(ADDRESS)
    try:
        channel, job = join(address, secret, rank)
    except (OSError, ProtocolError) as error:
        _say(_unreached(rank, address, error))
        return 1
    wrapper = Wrapper(channel, job, {STORE_KEY: store_key(secret).hex()}, parent)
    wrapper.launcher_lost = [int(number) for number in sys.argv[1:]]
    wrapper.prepare()
    try:
        return wrapper.run()
    except ProtocolError as error:  # somebody is on the way, or the network changes bits
        wrapper.channel.close()
        wrapper.abandon()
        _say(
            f"rank {rank}, host {socket.gethostname()}, was killed: what came from the launcher at"
            f" {address} could not be believed: {error}"
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
