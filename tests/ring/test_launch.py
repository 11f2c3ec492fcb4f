"""The launcher with real processes: what it prints, how it ends, and that nothing is left."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched_jobs import (
    DEADLINE,
    PYTHON,
    Launcher,
    Running,
    both,
    marked,
    needs_torch,
    until,
)

from ringlet.ring.errors import LaunchError, TransportUnavailable
from ringlet.ring.launch import launch, start
from ringlet.ring.processes.output import STDERR, STDOUT, Printer

pytestmark = needs_torch

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
    assert b"killing rank 1, which has not ended within 0.2 s of SIGTERM\n" in err


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


@pytest.mark.parametrize(
    ("env", "options", "transport"),
    [
        ({"RINGLET_TRANSPORT": "gloo"}, [], b"gloo"),
        ({"RINGLET_TRANSPORT": "mpi"}, ["--env", "RINGLET_TRANSPORT=gloo"], b"gloo"),
        ({"RINGLET_TRANSPORT": "mpi"}, ["--transport", "gloo"], b"gloo"),
        ({"RINGLET_TRANSPORT": "mpi", "RINGLET_RANK": "0"}, ["--min-np", "1"], b"gloo"),
        ({"RINGLET_TRANSPORT": "goo"}, [], b"RINGLET_TRANSPORT: unknown transport 'goo'"),
        ({"RINGLET_TRANSPORT": "mpi"}, ["--min-np", "1"], b"an elastic job cannot use MPI"),
    ],
)
def test_the_environment_may_name_the_transport(
    env: dict[str, str], options: list[str], transport: bytes
) -> None:
    command = [sys.executable, "-m", "ringlet", "run", "-np", "1", *options, "true"]
    returned, _, err = Running(command, uuid.uuid4().hex, env).end()
    started = transport == b"gloo"
    assert returned == (0 if started else 2)
    assert (b" over gloo" if started else transport) in err.splitlines()[0]


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
