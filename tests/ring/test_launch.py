"""The launcher with real processes: what it prints, how it ends, and that nothing is left."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlet.ring.errors import LaunchError, ProtocolError, TransportUnavailable
from ringlet.ring.functions import WorkerFailed, parcels, run
from ringlet.ring.launch import launch, start
from ringlet.ring.processes.output import STDERR, STDOUT, Printer
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.wire.handshake import Keys
from ringlet.ring.wire.launch_link import Channel, Kind

DEADLINE = 60.0  # seconds; generous, nothing waits for it when all is well
MARK = "RINGLET_TEST_MARK"
PYTHON = [sys.executable, "-I", "-S", "-c"]

HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None
NEEDS = {
    "mpi": [pytest.mark.mpi, pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")],
    "gloo": [pytest.mark.skipif(not HAS_TORCH, reason="needs torch")],
}
both = pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=marks) for name, marks in NEEDS.items()]
)
pytestmark = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


def until(condition: Callable[[], Any]) -> Any:
    """Wait for ``condition`` to hold; fail after the deadline."""
    limit = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < limit, "the deadline has passed"
        time.sleep(0.01)
    return value


def marked(mark: str) -> dict[int, str]:
    """Return command lines by id of the living processes that were started under ``mark``."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found  # a zombie has neither environment nor command line


class Running:
    """A launcher as a process of its own, and what it prints."""

    def __init__(self, command: list[str], mark: str, env: dict[str, str]) -> None:
        self.mark = mark
        self.output = b""
        self.process = subprocess.Popen(
            command,
            env=os.environ | {MARK: mark} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def until(self, text: bytes, times: int = 1) -> None:
        """Read the standard output until ``text`` was there ``times`` times."""
        assert self.process.stdout is not None
        limit = time.monotonic() + DEADLINE
        while self.output.count(text) < times:
            assert select.select([self.process.stdout], [], [], limit - time.monotonic())[0]
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, (self.output, self.process.communicate())
            self.output += data

    def end(self) -> tuple[int, bytes, bytes]:
        """Wait for the end and for everything it started; return code and output."""
        out, err = self.process.communicate(timeout=DEADLINE)
        until(lambda: not marked(self.mark))
        return self.process.returncode, self.output + out, err

    def pids(self, what: str) -> list[int]:
        """Return the ids of the job's processes whose command line holds ``what``."""
        return sorted(pid for pid, line in marked(self.mark).items() if what in line)


Launcher = Callable[..., Running]


@pytest.fixture
def ringlet(tmp_path: Path) -> Iterator[Launcher]:
    """Start ``ringlet run``; afterwards no process and no temporary file may be left."""
    started: list[Running] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def begin(
        code: str, np: int = 2, transport: str = "gloo", *options: str, command: Any = PYTHON
    ) -> Running:
        arguments = ["-m", "ringlet", "run", "-np", str(np), "--transport", transport, *options]
        mark, env = uuid.uuid4().hex, {"TMPDIR": str(scratch)}
        started.append(Running([sys.executable, *arguments, *command, code], mark, env))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.communicate()
        for pid in marked(running.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not list(scratch.iterdir())


RANK = "import os, sys, signal; rank = int(os.environ['RINGLET_RANK'])\n"
# Handlers and what they may interrupt write directly: a buffered print cannot be entered twice.
READY = "os.write(1, b'ready\\n')\n"
WAIT = f"{READY}\nwhile True: signal.pause()\n"


# What is printed.


@both
def test_lines_carry_their_rank(ringlet: Launcher, transport: str) -> None:
    code = RANK + "print('out', rank); print('err', rank, file=sys.stderr)"
    returned, out, err = ringlet(code, 3, transport).end()
    assert returned == 0
    assert sorted(out.splitlines()) == [b"[%d]<stdout>: out %d" % (n, n) for n in range(3)]
    started, *lines = err.splitlines()
    assert started.startswith(f"ringlet run: 3 ranks over {transport}: ".encode())
    assert sorted(lines) == [b"[%d]<stderr>: err %d" % (n, n) for n in range(3)]


def test_bytes_pass_through_as_they_are(ringlet: Launcher) -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)) + b'\\n\\xff\\xfe end')"
    returned, out, _ = ringlet(code, 1, "gloo", "--no-prefix").end()
    assert (returned, out) == (0, bytes(range(256)) + b"\n\xff\xfe end")


def test_long_lines_stay_whole(ringlet: Launcher) -> None:
    code = RANK + "sys.stdout.write(str(rank) * 3_000_000)"
    returned, out, _ = ringlet(code, 2).end()
    assert returned == 0
    lines = [b"[%d]<stdout>: " % n + b"%d" % n * 3_000_000 for n in range(2)]
    assert sorted(out.splitlines()) == lines


@both
def test_a_million_lines_arrive_in_order(ringlet: Launcher, transport: str) -> None:
    code = RANK + "sys.stdout.writelines(f'{rank} {n}\\n' for n in range(500_000))"
    returned, out, _ = ringlet(code, 2, transport, "--no-prefix").end()
    assert returned == 0
    expected = [hashlib.sha256(), hashlib.sha256()]
    for rank, digest in enumerate(expected):
        digest.update(b"".join(b"%d %d\n" % (rank, n) for n in range(500_000)))
    found = [hashlib.sha256(), hashlib.sha256()]
    lines = out.splitlines(keepends=True)
    for rank in range(2):
        found[rank].update(b"".join(line for line in lines if line[0] == 48 + rank))
    assert [d.digest() for d in found] == [d.digest() for d in expected]


def printed(printer: Printer, stream: int) -> bytes:
    return b"".join(bytes(data) for where, data in printer._queue if where == stream)


@given(
    texts=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\r", b"")), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_cuts_do_not_show(texts: list[bytes], seed: int) -> None:
    cuts = random.Random(seed)
    printer = Printer(len(texts))
    rest = dict(enumerate(texts))
    while rest:
        rank = cuts.choice(list(rest))
        length = cuts.randint(1, 8)
        printer.feed(rank, STDOUT, rest[rank][:length])
        rest[rank] = rest[rank][length:]
        if not rest[rank]:
            del rest[rank]
            printer.finish(rank, STDOUT)
    lines = printed(printer, STDOUT).split(b"\n")[:-1]
    for rank, text in enumerate(texts):
        mark = b"[%d]<stdout>: " % rank
        mine = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        whole = text.split(b"\n")
        assert mine == (whole if whole[-1] else whole[:-1])
    assert printer.pending == len(printed(printer, STDOUT))


@pytest.mark.parametrize("length", range(1, 20))
def test_carriage_returns_end_lines(length: int) -> None:
    text = b"\r 10%\r 20%\r\nnext\nlast\r"
    printer = Printer(2)
    for begin in range(0, len(text), length):
        printer.feed(1, STDERR, text[begin : begin + length])
    printer.finish(1, STDERR)
    pieces = [b"\r", b" 10%\r", b" 20%\r\n", b"next\n", b"last\r\n"]
    assert printed(printer, STDERR) == b"".join(b"[1]<stderr>: " + piece for piece in pieces)


def test_what_others_say_is_shown_and_not_obeyed() -> None:
    printer = Printer(1)
    printer.note("host \x1b[31mred\x07\x9b \ud800 \udcff\ttold")
    said = b"ringlet run: host \\x1b[31mred\\x07\\x9b \\ud800 \\udcff\ttold\n"
    assert printed(printer, STDERR) == said
    printer = Printer(1)
    printer.note("caf\xe9 \udcff")  # a byte that is no UTF-8 stays what it was
    assert printed(printer, STDERR) == b"ringlet run: caf\xc3\xa9 \xff\n"


# How it ends.


@both
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with code 3; ending the other ranks"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by signal 9 (SIGKILL); ending the"),
        ("os.abort()", 134, "rank 1 was ended by signal 6 (SIGABRT); ending the"),
    ],
)
def test_the_first_failure_ends_the_job(
    ringlet: Launcher, transport: str, end: str, code: int, words: str
) -> None:
    running = ringlet(RANK + f"if rank == 1: sys.stdin.read(); {end}\n" + WAIT, 3, transport)
    returned, _, err = running.end()
    assert returned == code
    assert f"ringlet run: {words}".encode() in err
    assert b"hydra" not in err.lower()
    assert b"BAD TERMINATION" not in err


@pytest.mark.parametrize("code", ["import nothing_of_the_kind", "1 / 0"])
def test_a_module_that_another_python_lacks_has_a_remedy(code: str, tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "python3", "-c", code],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    remedy = f"python3 is {other}, and Ringlet is installed for {sys.executable}: activate"
    assert (remedy in done.stderr) == code.startswith("import")


@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]])
@pytest.mark.parametrize("module", ["horovod.torch", "nothing_of_the_kind"])
def test_a_script_of_horovods_is_told_who_stands_in_for_it(
    module: str, flags: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import {module} as hvd\n")
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    done = subprocess.run(
        [*command, *flags, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    hint = f"{script} imports horovod, which is not installed, and Ringlet can stand in for it: "
    hint += f"start python -m ringlet.as_horovod {script}"
    assert (hint in done.stderr) == module.startswith("horovod")


def test_all_is_well_when_every_rank_says_so(ringlet: Launcher) -> None:
    assert ringlet("pass", 3, "gloo", "--quiet").end() == (0, b"", b"")


def test_whoever_ignores_the_request_to_end_is_killed(ringlet: Launcher, tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn"
    code = (
        f"import os, pathlib\nfrom ringlet.ring.launch import launch\nprogram = {RANK!r}"
        " + 'signal.signal(15, signal.SIG_IGN)\\nif rank == 0:\\n while not os.path.exists("
        f'"{stubborn}"): pass\\n sys.exit(7)\\nopen("{stubborn}", "w")\\n\' + {WAIT!r}\n'
        f"raise SystemExit(launch([*{PYTHON!r}, program], 2, 'gloo', grace=0.2))"
    )
    mark = uuid.uuid4().hex
    running = Running([sys.executable, "-c", code], mark, {})
    returned, _, err = running.end()
    assert returned == 7
    assert b"rank 0 exited with code 7; ending the other ranks" in err


@pytest.mark.parametrize("code", [0, 5])
def test_what_a_rank_leaves_behind_is_ended(ringlet: Launcher, code: int) -> None:
    started = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session="
    program = RANK + f"{started}rank == 0)\nprint('text', flush=True)\nsys.exit({code})"
    returned, out, _ = ringlet(program, 2 if code == 0 else 1).end()
    assert returned == code
    assert b"[0]<stdout>: text\n" in out


def test_the_tail_of_a_pipeline_may_finish(ringlet: Launcher) -> None:
    # bash does not wait for the cat of a process substitution.
    code = "echo begin > >(read -t 0.2 x < /dev/zero; cat)"
    returned, out, _ = ringlet(code, 1, command=["bash", "-c"]).end()
    assert (returned, out) == (0, b"[0]<stdout>: begin\n")


@both
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_are_passed_on(ringlet: Launcher, transport: str, name: str) -> None:
    caught = f"signal.signal(signal.{name}, lambda *_: (os.write(1, b'caught\\n'), sys.exit(0)))\n"
    running = ringlet(RANK + caught + WAIT, 2, transport)
    running.until(b"ready\n", 2)
    running.process.send_signal(getattr(signal, name))
    returned, out, err = running.end()
    assert returned == 0
    assert out.count(b"caught") == 2
    assert f"{name} passed on to every rank".encode() in err


def test_an_interrupted_job_says_so(ringlet: Launcher) -> None:
    running = ringlet(RANK + "signal.signal(2, signal.SIG_DFL)\n" + WAIT, 2)
    running.until(b"ready\n", 2)
    running.process.send_signal(signal.SIGINT)
    returned, _, err = running.end()
    assert returned == 130
    assert b"ending the other ranks" not in err


@both
def test_the_second_interrupt_kills(ringlet: Launcher, transport: str) -> None:
    ignore = "signal.signal(2, lambda *_: os.write(1, b'no\\n')); signal.signal(15, lambda *_: 0)"
    running = ringlet(RANK + ignore + "\n" + WAIT, 2, transport)
    running.until(b"ready\n", 2)
    running.process.send_signal(signal.SIGINT)
    running.until(b"no\n", 2)
    running.process.send_signal(signal.SIGINT)
    assert running.end()[0] == 130


def test_interrupts_work_while_nobody_reads_the_output(ringlet: Launcher, tmp_path: Path) -> None:
    caught = tmp_path / "caught"
    code = f"signal.signal(2, lambda *_: open({str(caught)!r}, 'w'))\nwhile True: print('x' * 4000)"
    running = ringlet(RANK + code, 1)
    running.until(b"xxx")
    programs = running.pids("while True")

    def stuck() -> bool:
        counters = [Path(f"/proc/{pid}/io").read_text() for pid in programs]
        time.sleep(0.1)
        return counters == [Path(f"/proc/{pid}/io").read_text() for pid in programs]

    until(stuck)
    running.process.send_signal(signal.SIGINT)
    until(caught.exists)
    running.process.send_signal(signal.SIGINT)
    until(lambda: not running.pids("ringlet.ring.processes.rank_wrapper"))
    assert running.end()[0] == 130


def test_a_reader_that_goes_away_ends_the_job(ringlet: Launcher) -> None:
    running = ringlet("while True: print('x' * 1000)", 2)
    running.until(b"xxx")
    assert running.process.stdout is not None
    running.process.stdout.close()
    running.process.stdout = None
    assert running.process.wait(DEADLINE) == 141
    until(lambda: not marked(running.mark))


# Nothing is left when somebody is killed.

FAMILY = RANK + "import subprocess; subprocess.Popen(['sleep', '1000'])\n" + WAIT


@both
def test_killing_a_wrapper_ends_the_job(ringlet: Launcher, transport: str) -> None:
    running = ringlet(FAMILY, 2, transport)
    running.until(b"ready\n", 2)
    wrappers = running.pids("ringlet.ring.processes.rank_wrapper")
    assert len(wrappers) == 2
    os.kill(wrappers[0], signal.SIGKILL)
    returned, _, err = running.end()
    assert returned == 137
    assert b"was killed together with its wrapper" in err


@both
def test_killing_the_launcher_leaves_nothing(ringlet: Launcher, transport: str) -> None:
    running = ringlet(FAMILY, 2, transport)
    running.until(b"ready\n", 2)
    running.process.kill()
    returned, _, err = running.end()
    assert returned == -9
    said = b"ringlet run: the launcher has ended without a word, such as by SIGKILL or for lack of"
    assert err.count(said) == 1  # one of the ranks' wrappers says it
    assert err.endswith(
        b"all its ranks are killed. What was saved to files is left to start again from\n"
    )


@both
def test_killing_a_rank_ends_the_job(ringlet: Launcher, transport: str) -> None:
    running = ringlet(FAMILY, 2, transport)
    running.until(b"ready\n", 2)
    programs = running.pids("signal.pause")
    ranks = [
        p for p in programs if parent(p) in running.pids("ringlet.ring.processes.rank_wrapper")
    ]
    os.kill(ranks[0], signal.SIGKILL)
    assert running.end()[0] == 137


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# What the ranks find.


@both
def test_the_environment_of_a_rank(ringlet: Launcher, transport: str) -> None:
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    options = ("--env", "A=b=c\nd", "--env", "OMP_NUM_THREADS=5", "--no-prefix")
    returned, out, _ = ringlet(code, 2, transport, *options).end()
    assert returned == 0
    found = sorted(map(json.loads, out.splitlines()), key=lambda env: env["RINGLET_RANK"])
    for rank, env in enumerate(found):
        assert env["RINGLET_TRANSPORT"] == transport
        assert env["RINGLET_RANK"] == env["RINGLET_LOCAL_RANK"] == str(rank)
        assert env["RINGLET_SIZE"] == env["RINGLET_LOCAL_SIZE"] == "2"
        assert env["PYTHONUNBUFFERED"] == "1"
        assert (env["A"], env["OMP_NUM_THREADS"]) == ("b=c\nd", "5")
        assert not any("SECRET" in name or name.startswith("HYDRA") for name in env)
        assert "OPENBLAS_NUM_THREADS" not in set(env) - set(os.environ)


def test_threads_are_divided(ringlet: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for np in (1, cores + 1):
        returned, out, _ = ringlet("import os; print(os.environ['OMP_NUM_THREADS'])", np).end()
        assert returned == 0
        assert {line.split()[-1] for line in out.splitlines()} == {b"%d" % max(1, cores // np)}


@both
def test_a_batch_system_around_it_does_not_matter(ringlet: Launcher, transport: str) -> None:
    around = ["SLURM_JOB_ID=7", "SLURM_NNODES=2", "SLURM_NODELIST=n[1-2]", "PMI_RANK=5", "RANK=1"]
    os.environ.update(dict(item.split("=") for item in around))
    try:
        running = ringlet("import os; print(os.environ['RINGLET_RANK'])", 2, transport)
        returned, out, _ = running.end()
    finally:
        for item in around:
            del os.environ[item.split("=")[0]]
    assert returned == 0
    assert sorted(out.splitlines()) == [b"[0]<stdout>: 0", b"[1]<stdout>: 1"]


def test_what_mpiexec_says_is_shown_when_nothing_else_explains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho no such network >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr(start, "mpiexec", lambda: str(broken))
    with pytest.raises(LaunchError, match=r"mpiexec ended with code 4; it said:\nno such network"):
        launch(["true"], 2, "mpi")


def test_the_transport_is_chosen_and_the_choice_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking: set[str] = set()
    monkeypatch.setattr(start, "_missing", lambda m: f"{m} is not here" if m in lacking else None)
    monkeypatch.setattr(start, "mpiexec", lambda: "/bin/true")
    assert start.choose_transport(None) == ("mpi", None)
    monkeypatch.setattr(start, "mpiexec", lambda: None)
    transport, remark = start.choose_transport(None)
    assert transport == "gloo"
    assert remark is not None
    assert "no mpiexec was found" in remark
    with pytest.raises(TransportUnavailable, match="no mpiexec was found"):
        start.choose_transport("mpi")
    lacking.add("torch")
    with pytest.raises(LaunchError, match=r"torch is not here.*pip install 'ringlet\[mpi\]'"):
        start.choose_transport(None)
    for name in ("local", "nccl", "gluu"):
        with pytest.raises((LaunchError, TransportUnavailable)):
            start.choose_transport(name)


# The link between launcher and wrapper.


def pair() -> tuple[Channel, Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    listener.close()
    return Channel(one, Keys(b"one", b"two")), Channel(two, Keys(b"two", b"one"))


def test_kernels_tell_how_long_the_other_host_is_silent() -> None:
    ends = pair()
    time.sleep(2.5)  # no word of ours, but the kernels ask each other
    assert max(end.silence() for end in ends) < 2.0
    for end in ends:
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    time.sleep(2.5)
    assert min(end.silence() for end in ends) >= 2.4
    for end in ends:
        end.close()
        assert end.silence() == 0.0


def test_frames_arrive_whole_and_in_order() -> None:
    one, two = pair()
    bodies = [os.urandom(length) for length in (0, 1, 70_000, 2_000_000, 3)]
    for body in bodies:
        one.send(Kind.STDOUT, body)
    got: list[bytes] = []

    def all_there() -> bool:
        one.flush()
        got.extend(body for _, body in two.receive())
        return len(got) == len(bodies)

    until(all_there)
    assert got == bodies
    one.close()
    until(lambda: list(two.receive()) == [] and two.closed)
    two.close()


def test_frames_that_the_other_end_has_not_made() -> None:
    one, two = pair()
    one._outgoing += bytes(100)
    one.flush()

    def refused() -> bool:
        try:
            list(two.receive())
        except ProtocolError:
            return True
        return False

    until(refused)
    one.close()
    two.close()


# ringlet.run


@both
def test_run_returns_results_by_rank(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    def triple(base: int, *, more: list[int]) -> tuple[int, list[int]]:
        print("hello")
        return base + 3 * int(os.environ["RINGLET_RANK"]), more

    assert run(triple, (10,), {"more": [1]}, np=2, transport=transport) == [(10, [1]), (13, [1])]
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == [
        "[0]<stdout>: hello",
        "[1]<stdout>: hello",
    ]


def test_run_raises_what_a_rank_raised() -> None:
    def fail() -> None:
        if os.environ["RINGLET_RANK"] == "1":
            raise ZeroDivisionError("on purpose \udcff")
        while True:
            signal.pause()

    with pytest.raises(WorkerFailed, match="rank 1 raised") as caught:
        run(fail, np=2, transport="gloo")
    assert caught.value.rank == 1
    assert "ZeroDivisionError: on purpose" in caught.value.traceback
    assert "in fail" in caught.value.traceback
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.rank, str(again)) == (1, str(caught.value))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda: os._exit(0), "rank 0 ended without a result"),
        (lambda: os._exit(6), "rank 0 exited with code 6"),
        (lambda: os.kill(os.getpid(), 9), r"ended by signal 9 \(SIGKILL\)"),
        (lambda: sys.exit(0), "SystemExit"),
        (lambda: (i for i in ()), "cannot pickle 'generator'"),
    ],
)
def test_run_says_when_there_is_no_result(fn: Callable[[], Any], words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        run(fn, np=1, transport="gloo")


def test_an_environment_that_cannot_be_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "pass"]
    assert launch(command, 1, "gloo", env={"A": "b\0c"}) == 126
    assert "embedded null byte" in capfd.readouterr().err


class Leaves:
    """Something whose reading ends the program that reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (0,)


def test_run_outlives_a_result_that_would_end_it() -> None:
    with pytest.raises(LaunchError, match=r"result of rank 0 cannot be read: SystemExit\(0\)"):
        run(Leaves, np=1, transport="gloo")


def test_run_says_what_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="cannot be sent"):
        run(print, ((i for i in ()),), transport="gloo")
    monkeypatch.setattr(parcels, "pickler", lambda: pickle)
    with pytest.raises(LaunchError, match=r"pip install 'ringlet\[run\]'"):
        run(lambda: 1, transport="gloo")
    monkeypatch.setattr(Running, "__module__", "__main__")
    with pytest.raises(LaunchError, match=r"main script; pip install 'ringlet\[run\]'"):
        run(Running, transport="gloo")


def test_run_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "pickler", lambda: pickle)
    names = run(os.getenv, ("RINGLET_SIZE",), np=1, transport="gloo")
    assert names == ["1"]


# connect()

JOIN = (
    "import numpy, sys\nfrom ringlet.ring.rendezvous.connect import connect\n"
    "for _ in range(2):\n    c = connect(); x = numpy.ones(3, numpy.float32); c.allreduce(x)\n"
    "    line = f'{c.name} {c.rank} {c.size} {int(x[0])}\\n'; c.close()\n"
    "sys.stdout.write(line)\n"
)


@both
def test_connect_under_ringlet_run(ringlet: Launcher, transport: str) -> None:
    returned, out, err = ringlet(JOIN, 2, transport, command=[sys.executable, "-c"]).end()
    assert returned == 0, err
    assert sorted(out.decode().splitlines()) == [
        f"[{n}]<stdout>: {transport} {n} 2 2" for n in range(2)
    ]


def outside(command: list[str], env: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """Run ``command`` to its end; return code, sorted lines and errors."""
    mark = uuid.uuid4().hex
    returned, out, err = Running(command, mark, env or {}).end()
    return returned, sorted(out.decode().splitlines()), err.decode()


def test_connect_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # The user's own process group shares torchrun's store with ours.
    own = "import torch.distributed as d; d.init_process_group('gloo')\n"
    script.write_text(own + JOIN + "d.destroy_process_group()\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    returned, out, err = outside([*torchrun, "--standalone", str(script)])
    assert returned == 0, err
    assert out == ["gloo 0 2 2", "gloo 1 2 2"]


def test_connect_with_torchruns_variables_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    env = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = "import torch.distributed as d\n"
    end = "d.init_process_group('gloo'); d.destroy_process_group()\n"
    returned, out, err = outside([sys.executable, "-c", own + JOIN + end], env)
    assert returned == 0, err
    assert out == ["gloo 0 1 1"]


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
def test_connect_under_plain_mpiexec() -> None:
    program = start.mpiexec()
    assert program is not None
    returned, out, err = outside([program, "-n", "2", sys.executable, "-c", JOIN])
    assert returned == 0, err
    assert out == ["mpi 0 2 2", "mpi 1 2 2"]


FAIL = (
    "import atexit\nfrom ringlet.ring.rendezvous.connect import connect\nc = connect()\n"
    "atexit.register(print, 'bye')\nif c.rank == 1: raise ValueError('on purpose')\nc.barrier()\n"
)


@both
def test_an_exception_on_one_rank_ends_the_job(ringlet: Launcher, transport: str) -> None:
    returned, out, err = ringlet(FAIL, 2, transport, command=[sys.executable, "-c"]).end()
    assert returned == 1
    assert b"[1]<stdout>: bye\n" in out
    assert b"[1]<stderr>: ValueError: on purpose\n" in err
    assert b"ringlet run: rank 1 exited with code 1" in err  # whether others are left is chance


EXIT = """
import sys
import torch
import ringlet.torch as hvd
hvd.init()
if hvd.rank() == 1:
    sys.exit(3)
hvd.barrier()
"""


@both
def test_an_exit_code_is_returned_though_others_wait(ringlet: Launcher, transport: str) -> None:
    returned, _, err = ringlet(EXIT, 3, transport, command=[sys.executable, "-c"]).end()
    assert returned == 3
    assert b"ringlet run: rank 1 exited with code 3" in err


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
def test_an_exception_on_one_rank_ends_a_job_of_mpiexec() -> None:
    returned, out, err = outside([str(start.mpiexec()), "-n", "2", sys.executable, "-c", FAIL])
    assert returned == 1
    assert "bye" in out
    assert "ValueError: on purpose" in err


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=NEEDS["mpi"])])
def test_mpi_abort_decides_the_exit_code(ringlet: Launcher, transport: str) -> None:
    code = "from mpi4py import MPI\nc = MPI.COMM_WORLD\nif c.rank == 1: c.Abort(7)\nc.Barrier()\n"
    returned, _, err = ringlet(code, 2, transport, command=[sys.executable, "-c"]).end()
    assert returned == 7
    assert b"rank 1 called MPI_Abort with code 7; ending the other ranks\n" in err


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        {"RINGLET_RANK": "1", "RINGLET_SIZE": "3"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "1"},
    ],
)
def test_a_job_never_falls_apart_silently(env: dict[str, str]) -> None:
    code = "from ringlet.ring.rendezvous.connect import connect; connect()"
    env = {**env, "RINGLET_TRANSPORT": "mpi"}
    returned, _, err = outside([sys.executable, "-c", code], env)
    assert returned == 1
    assert "LaunchError: the launcher (" in err
    assert "says rank 1 of 3, transport 'mpi' sees rank 0 of 1: start the job with" in err


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("RINGLET_", "PMI", "OMPI_", "SLURM_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)
    return monkeypatch


def test_connect_alone(bare: pytest.MonkeyPatch) -> None:
    communicator = connect()
    assert (communicator.name, communicator.rank, communicator.size) == ("local", 0, 1)
    communicator.close()


def test_connect_says_what_is_missing(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="Did you mean 'mpi'"):
        connect("mpii")
    with pytest.raises(TransportUnavailable, match=r"NCCL|cupy|GPU"):
        connect("nccl")
    bare.setenv("PMI_RANK", "0")
    bare.setenv("PMI_SIZE", "2")
    with pytest.raises(LaunchError, match="set MASTER_ADDR to the host of rank 0"):
        connect("gloo")
    with pytest.raises(LaunchError, match="rank 0 of 2, transport 'local' sees rank 0 of 1"):
        connect("local")


def test_a_meeting_place_of_somebody_else_is_refused(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare.setenv("TMPDIR", str(tmp_path))
    names = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_RANK", "COMM_WORLD_LOCAL_SIZE")
    for name, value in zip(names, "0202", strict=True):
        bare.setenv(f"OMPI_{name}", value)
    bare.setenv("PMIX_NAMESPACE", "job")
    open_to_all = tmp_path / f"ringlet-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        connect("gloo")
    shutil.rmtree(open_to_all)
    open_to_all.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="not a directory of this user alone"):
        connect("gloo")
