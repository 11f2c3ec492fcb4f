"""What the launcher says of a job that failed: the cause, not the first effect."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringlet.ring import awake_clock
from ringlet.ring.awake_clock import SLACK, AwakeClock
from ringlet.ring.errors import LOST_PEER, LaunchError, PeerLost
from ringlet.ring.launch import failure_report, rank_table, start
from ringlet.ring.launch.failure_report import FailureReport
from ringlet.ring.launch.rank_table import CAUSE, LEAVING, Rank, RankTable
from ringlet.ring.launch.start import Started
from ringlet.ring.launch.termination import NOTICE, SAVING, Termination
from ringlet.ring.processes.output import Printer
from ringlet.ring.rendezvous import loss_report
from ringlet.ring.rendezvous.loss_report import LossReport, leaving_name, loss_report_name
from ringlet.ring.wire.keys import STORE_KEY
from ringlet.ring.wire.kv_store import KvStore, Op
from ringlet.ring.wire.launch_link import Channel

pytestmark = pytest.mark.preloaded("torch")

DEADLINE = 120.0  # seconds; generous, nothing waits for it when all is well
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None

LEFT = "rank {} exited with code 0 while others still needed it, so rank {} exited with code 75"


def verdict(
    codes: dict[int, tuple[int | None, int]], mpi: bool = False, **told: LossReport
) -> FailureReport:
    """Return the verdict on ranks with these (code, moment of the end), and what they told."""
    ranks = [Rank(n, "host", code=code, when=when) for n, (code, when) in codes.items()]
    kv_store = KvStore()
    for name, report in told.items():
        name = loss_report_name(int(name.removeprefix("rank")))
        kv_store._do(Op.SET, [name.encode(), report.pack()])
    table = RankTable(ranks, Printer(len(ranks)), lambda _: {})
    table.clock = cast(AwakeClock, SimpleNamespace(now=count(0.0, 2 * LEAVING).__next__))
    found = FailureReport(table, kv_store, several=False, mpi=mpi)
    assert found.reached() or found.reached()  # no other cause comes while one is waited for
    assert not found.reached()
    return found


def test_a_rank_that_left_early_is_the_cause() -> None:
    found = verdict({0: (LOST_PEER, 5), 1: (0, 3), 2: (LOST_PEER, 4)})
    assert found.reason() == LEFT.format(1, 2)
    assert found.code() == LOST_PEER
    assert found.first is not None
    assert found.first.number == 2


def test_it_may_take_longer_to_end_than_those_who_lost_it() -> None:
    found = verdict({0: (LOST_PEER, 2), 1: (0, 3)}, rank0=LossReport((1,), "rank 1 has shut down"))
    assert found.reason() == LEFT.format(1, 0)


def test_what_the_ranks_told_decides_between_several() -> None:
    # Rank 2 was lost by rank 0, but only because it had itself lost rank 1.
    told = {"rank0": LossReport((1, 2), "two"), "rank2": LossReport((1,), "one")}
    found = verdict({0: (LOST_PEER, 5), 1: (0, 3), 2: (LOST_PEER, 4), 3: (0, 1)}, **told)
    assert found.reason() == LEFT.format(1, 2)


def test_another_failure_is_a_cause_of_its_own() -> None:
    assert (
        verdict({0: (LOST_PEER, 5), 1: (0, 3), 2: (6, 9)}).reason() == "rank 2 exited with code 6"
    )
    assert verdict({0: (1, 5), 1: (0, 3)}).reason() == "rank 0 exited with code 1"


def test_whoever_ended_well_is_not_blamed_for_a_frozen_rank() -> None:
    codes: dict[int, tuple[int | None, int]] = {0: (LOST_PEER, 5), 1: (0, 3), 2: (None, 0)}
    told = LossReport((2,), "rank 2 is gone: no sign of life\nfor 2 s")
    words = "rank 0 exited with code 75, having lost another rank: rank 2 is gone: no sign of life"
    assert verdict(codes, rank0=told).reason() == f"{words} for 2 s"
    words = "rank 0 exited with code 75, as one does that has lost another rank; still there: 2"
    assert verdict(codes).reason() == words


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"null", b"[1]", b'["x", 1]', b"[[null], 1]", b"\xff"),
        *(b"[" * 200_000, b'[[1e999], "x"]'),
    ],
)
def test_a_report_that_makes_no_sense_says_nothing(value: bytes) -> None:
    assert LossReport.unpack(value) == LossReport()


def test_a_report_holds_the_cause_and_not_where_it_was_traced() -> None:
    text = "rank 2 is gone\n\nIn a graph, traced at:\n" + '  File "train.py", line 1\n' * 50
    assert LossReport.unpack(LossReport((2,), text).pack()).text == "rank 2 is gone"


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return what time it is for launchers: whoever adds to it lets time pass."""
    now = [100.0]
    monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def later(now: list[float], termination: Termination, seconds: float) -> None:
    """Judge after so many seconds in which the launcher has slept."""
    termination._clock.sleep(seconds)
    now[0] += seconds
    termination.judge()


@pytest.mark.parametrize(
    "tries",
    [[(60.0, False), (0.1, True)], [(60.0, False), (2.0, False)], [(0.1, False)], [(0.1, True)]],
)
def test_a_rank_that_stood_still_as_it_told_how_it_ends_tells_once_more(
    monkeypatch: pytest.MonkeyPatch, tries: list[tuple[float, bool]]
) -> None:
    """It was killed as it saved, as nobody knew that it was leaving. (seconds, whether it works)"""
    now, left = [100.0], list(tries)

    class Store:
        def __init__(self, *_: object) -> None:
            seconds, works = left.pop(0)
            now[0] += seconds
            if not works:
                raise LaunchError("rank 1 cannot reach the launcher's store")

        def ask(self, *_: object, timeout: float) -> None:
            assert timeout == loss_report.PATIENCE

        def close(self) -> None:
            pass

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(loss_report, "Client", Store)
    env = {"RINGLET_RENDEZVOUS": "ringlet://host:1", STORE_KEY: "00", "RINGLET_RANK": "1"}
    _, works = tries[-1]
    assert loss_report.report_loss(PeerLost("rank 0 is gone", [0]), env) == works
    assert not left


def ending(*ranks: Rank) -> tuple[FailureReport, Termination]:
    """Return what judges these ranks, and ends those that are left."""
    printer = Printer(len(ranks))
    table = RankTable(ranks, printer, lambda _: {})
    failure = FailureReport(table, KvStore(), several=False)
    return failure, Termination(table, failure, printer, grace=5.0)


def test_a_cause_that_is_due_between_two_looks_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen rank says nothing that would wake the launcher."""
    now = clock(monkeypatch)
    frozen = Rank(1, channel=cast(Channel, object()))
    failure, termination = ending(Rank(0, code=LOST_PEER, when=0, done=True), frozen)
    termination.judge()
    later(now, termination, CAUSE - 0.01)
    assert failure.first is None
    now[0] += 0.02
    assert termination.patience() == 0.1
    termination.judge()
    assert (
        failure.reason()
        == "rank 0 exited with code 75, as one does that has lost another rank; still there: 1"
    )


def test_a_manager_that_ends_between_two_looks_is_still_told_of() -> None:
    code: list[int | None] = [None]
    manager = SimpleNamespace(process=SimpleNamespace(poll=lambda: code[0]))
    lost = [Rank(n, code=-signal.SIGKILL, when=n, lost=True, done=True) for n in range(2)]
    failure, termination = ending(*lost)
    failure.manager = cast(Started, manager)
    termination.judge()
    assert not termination.explained
    code[0] = 5
    assert not termination.explained
    assert termination.patience() is not None
    termination.judge()
    assert termination.explained
    assert failure.reason() == "mpiexec ended every rank with code 5, as after MPI_Abort"


@pytest.mark.parametrize(("asked", "seconds"), [(True, SAVING), (False, NOTICE + 5.0)])
def test_who_was_asked_to_end_may_save_though_others_have_died_of_it(
    monkeypatch: pytest.MonkeyPatch, asked: bool, seconds: float
) -> None:
    now, said = clock(monkeypatch), list[str]()
    monkeypatch.setattr(Printer, "note", lambda _, text: said.append(text))
    channel = cast(Channel, SimpleNamespace(send=lambda *_: None, silence=lambda: 0.0))
    _, termination = ending(
        Rank(0, channel=channel), Rank(1, code=-signal.SIGTERM, when=1, done=True)
    )
    if asked:
        termination.forward(signal.SIGTERM)
    termination.judge()
    later(now, termination, NOTICE)
    later(now, termination, seconds - NOTICE - 0.1)
    assert not termination.killed
    later(now, termination, 0.2)
    assert termination.killed
    after = "30 s of the first failure" if asked else "5 s of SIGTERM"
    assert said[-1] == f"killing rank 0, which has not ended within {after}"


def test_time_in_which_the_launcher_stood_still_is_left_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stood still too, and were ended before they could save."""
    now, sent = clock(monkeypatch), list[Any]()
    channel = cast(Channel, SimpleNamespace(send=lambda *given: sent.append(given)))
    _, termination = ending(
        Rank(0, channel=channel), Rank(1, code=-signal.SIGKILL, when=1, done=True)
    )
    termination.judge()
    for _ in range(2):  # until they are asked to end, and until they are killed
        before, seconds = len(sent), 5.0 if sent else NOTICE
        now[0] += 60.0
        termination.judge()
        assert len(sent) == before
        later(now, termination, seconds - SLACK - 0.01)
        assert len(sent) == before
        later(now, termination, SLACK + 0.02)
        assert len(sent) == before + 1
    assert termination.killed


def launched(np: int, transport: str, *program: str) -> tuple[Any, list[str]]:
    """Run a program on so many ranks; return how it ended, and what the launcher said."""
    options = ["-m", "ringlet", "run", "--quiet", "-np", str(np), "--transport", transport]
    done = subprocess.run(
        [sys.executable, *options, sys.executable, "-c", *program],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done, [s for s in done.stderr.splitlines() if s.startswith("ringlet run: ")]


EARLY = """
import torch
import ringlet.torch as hvd
hvd.init()
x = torch.ones(4)
hvd.allreduce(x)
while hvd.rank() == 0:
    hvd.allreduce(x)
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize(
    "transport",
    [
        "gloo",
        pytest.param(
            "mpi",
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec"),
            ],
        ),
    ],
)
def test_the_launcher_names_who_left(transport: str) -> None:
    done, said = launched(2, transport, EARLY)
    assert done.returncode == LOST_PEER, done.stderr
    assert len(said) == 1
    # Over MPI rank 1 waits in MPI_Finalize, which may take longer than others wait for it.
    lost = "rank 0 exited with code 75, having lost another rank: rank 1 has shut down while"
    assert LEFT.format(1, 0) in said[0] or (transport == "mpi" and lost in said[0])


SLOW_TO_END = """
import atexit, os, sys, time
if os.environ["RINGLET_RANK"] == "1":
    atexit.register(time.sleep, 6)  # as an interpreter takes where others keep the cores
import torch
import ringlet.torch as hvd
hvd.init()
x = torch.ones(4)
hvd.allreduce(x)
if hvd.rank() == 1:
    {end}
while True:
    hvd.allreduce(x)
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize(
    ("end", "code"), [("raise SystemExit(5)", 5), ("sys.exit(5)", 5), ("1 / 0", 1)]
)
def test_a_rank_that_is_slow_to_end_is_the_cause(end: str, code: int) -> None:
    """Longer than the launcher waits for a cause: the rank has said that it ends."""
    done, said = launched(2, "gloo", SLOW_TO_END.format(end=end))
    assert said == [f"ringlet run: rank 1 exited with code {code}"], done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(("told", "patience"), [(b"5", LEAVING), (b"?", LEAVING), (b"75", CAUSE)])
def test_a_rank_on_its_way_out_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch, told: bytes, patience: float
) -> None:
    """But not without end, and not where it ends because it lost another one, too."""
    now = clock(monkeypatch)
    effect, leaving = Rank(0, code=LOST_PEER, when=0), Rank(1)
    kv_store = KvStore()
    kv_store._do(Op.SET, [leaving_name(1).encode(), told])
    table = RankTable([effect, leaving], Printer(2), lambda _: {})
    failure = FailureReport(table, kv_store, several=False)
    assert not failure.reached()
    table.clock.sleep(patience)
    now[0] += patience
    assert not failure.reached()
    now[0] += 0.01
    assert failure.reached()
    assert failure.first is effect


def test_a_cause_is_waited_for_longer_where_the_launcher_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So did the rank that is the cause, and the effect was named."""
    now = clock(monkeypatch)

    class Late:
        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            now[0] += milliseconds / 1000 + 2 * CAUSE
            return []

    monkeypatch.setattr(rank_table, "select", SimpleNamespace(poll=Late, POLLIN=1, POLLOUT=4))
    effect = Rank(0, code=LOST_PEER, when=0)
    table = RankTable([effect, Rank(1)], Printer(2), lambda _: {})
    failure = FailureReport(table, KvStore(), several=False)
    assert not failure.reached()
    table.wait([], KvStore(), 0.1)
    assert not failure.reached()
    table.clock.sleep(CAUSE)
    now[0] += CAUSE
    assert failure.reached()
    assert failure.first is effect


BEFORE_INIT = """
import os, sys
if os.environ["RINGLET_RANK"] == "1":
    sys.exit(0)
import ringlet.torch as hvd
hvd.init()
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize(
    ("transport", "cause"),
    [
        ("gloo", "rank 1 exited with code 0 while others still needed it, so rank"),
        pytest.param(
            "mpi",
            "rank 1 exited with code 0 before MPI_Init, in which others wait for it; ending",
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec"),
            ],
        ),
    ],
)
def test_nobody_waits_for_a_rank_that_has_ended_before_init(transport: str, cause: str) -> None:
    done, said = launched(3, transport, BEFORE_INIT)
    assert done.returncode == LOST_PEER, done.stderr
    assert len(said) == 1
    assert cause in said[0]
    told = "PeerLost: rank 1 ended before reaching init(), which every rank has to call"
    assert done.stderr.count(told) == (2 if transport == "gloo" else 0)


FAILS = """
import sys
import torch
import ringlet.torch as hvd
rank, how = int(sys.argv[1]), sys.argv[2]
hvd.init()
model = torch.nn.Linear(4, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), compression="fp16")
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
try:
    for step in range(5):
        if step == 2 and hvd.rank() == rank:
            if how == "exits":
                sys.exit(3)
            if how == "exits at last":
                raise SystemExit(3)
            raise ValueError("no data:\\n shard 7")
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
finally:
    if how.endswith("at last"):
        hvd.shutdown()
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [(1, "raises", "ValueError: no data: shard 7"), (0, "raises", "ValueError: no data: shard 7"),
     (1, "exits", "SystemExit: 3"),
     (1, "raises at last", "while handling ValueError: no data: shard 7"),
     (1, "exits at last", "while handling SystemExit: 3")],
)  # fmt: skip
def test_who_waits_for_a_rank_is_told_what_ended_it(rank: int, how: str, words: str) -> None:
    """Over gloo: mpiexec ends those who wait, maybe before they say it."""
    done, _ = launched(2, "gloo", FAILS, str(rank), how)
    assert done.returncode == (3 if "exits" in how else 1), done.stderr
    told = f"PeerLost: rank {rank} has ended ({words})"
    asked = f" while a step of 'SGD' was waiting on rank {1 - rank}"
    # Rank 1 may come to that step when the coordinator has left with rank 0.
    assert any(f"{told}{late}\n" in done.stderr for late in [asked, *[""] * (rank == 0)])


HOOKED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import ringlet.torch as hvd
dist.init_process_group("gloo")
model, kind = torch.nn.Linear(300, 300), sys.argv[1]
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
else:
    torch.distributed.fsdp.fully_shard(model)
    hvd.compress_fsdp(model, "int8")
for step in range(20):
    if dist.get_rank() == 2 and step == 2:
        open("/no/such/file")
    model(torch.ones(4, 300)).sum().backward()
"""


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", LOST_PEER),
        ("NCCL error, ncclRemoteError: A call failed possibly due to a network error", LOST_PEER),
        ("mat1 and mat2 shapes cannot be multiplied", 1),
    ],
)
def test_a_connection_that_torch_has_lost_is_an_effect(said: str, code: int) -> None:
    """Others may be quicker to end than the rank whose failure they learn of."""
    program = (
        "from ringlet.ring.rendezvous.exit_hooks import leave_on_exception\n"
        f"leave_on_exception(always=False)\nraise RuntimeError({said!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_launcher_names_who_failed_where_torch_made_the_job(kind: str) -> None:
    """Who only lost a rank says so by its code, without ``hvd.init`` too."""
    done, said = launched(3, "gloo", HOOKED, kind)
    assert done.returncode == 1, done.stderr
    assert "rank 2 exited with code 1" in said[0], done.stderr
    assert "FileNotFoundError" in done.stderr


def test_a_bus_error_is_mostly_shared_memory_that_is_full() -> None:
    done, told = launched(2, "gloo", "import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    assert done.returncode == 128 + signal.SIGBUS
    assert "was ended by signal 7 (SIGBUS), as where /dev/shm is full: make it larger" in told[0]


def test_a_crash_is_so_only_where_there_is_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, hint in ((16 << 20, True), (64 << 20, False)):
        monkeypatch.setattr(failure_report, "shared_memory", lambda size=size: size)
        found = verdict({0: (-signal.SIGSEGV, 1), 1: (None, 0)})
        assert ("--transport gloo" in found.reason()) == hint


@pytest.mark.parametrize("mpi", [True, False])
@pytest.mark.parametrize("writable", [True, False])
def test_mpi_needs_shared_memory_that_can_be_written_to(
    mpi: bool, writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "may_share", lambda: writable)
    said = verdict({0: (143, 1), 1: (None, 0)}, mpi).reason()
    assert said.startswith("rank 0 exited with code 143")
    assert ("MPI needs /dev/shm, where this user may not write" in said) == (mpi and not writable)
    assert "/dev/shm" not in verdict({0: (143, 1)}, mpi).reason()  # one rank needs none


LOSING = """
import os, signal, sys, time
import numpy, ringlet.torch as hvd, torch
hvd.init()
x = torch.ones(1000)
hvd.allreduce(x, name="x")
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        hvd.allreduce(x, name="x")
except hvd.HorovodInternalError as error:
    print("caught", error.ranks, flush=True)
    raise
finally:
    time.sleep(0.5)  # as saving would take
    print("saved", flush=True)
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_those_that_lose_a_rank_have_time_to_raise_and_to_save() -> None:
    done, told = launched(3, "gloo", LOSING)
    assert done.returncode == 137, done.stderr
    said = sorted(line.partition("<stdout>: ")[2] for line in done.stdout.splitlines())
    assert said == ["caught (1,)"] * 2 + ["saved"] * 2
    assert "rank 1 was ended by signal 9 (SIGKILL)" in told[0]


def test_a_program_that_keeps_what_it_has_caught_of_sys_exit_ends_well() -> None:
    """As pytest.raises does, and who tests a command line."""
    program = (
        "import sys\nfrom ringlet.ring.rendezvous.exit_hooks import leave_on_exception as leave\n"
        "leave(True)\ntry: sys.exit(2)\nexcept SystemExit as error: kept = error\n"
    )
    for more in ("", "for i in range(3): print(i)\n", "def main(): return 3\nmain()\n"):
        # -B: by itself, and not inside of the program that forks others.
        words = [sys.executable, "-B", "-c", program + more]
        done = subprocess.run(words, capture_output=True, timeout=DEADLINE, check=False)
        assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("try: sys.exit(2)\nexcept SystemExit: pass", 0),
        ("try: sys.exit(2)\nexcept SystemExit as error: print(error.code)", 0),
        ("try: sys.exit(2)\nexcept SystemExit as error: kept = error\nsys.exit(9)", 9),
        ("def main():\n with open('/dev/null'): sys.exit(4)\nmain()", 4),
        ("one = threading.Thread(target=sys.exit, args=[3])\none.start()\none.join()", 0),
        ("sys.exit(4)", 4),
        (
            "def late():\n threading.main_thread().join()\n sys.exit()\n"
            "threading.Thread(target=late).start()\nsys.exit(8)",
            8,
        ),
        ("try: sys.exit(5)\nfinally: print('leaving')", 5),
        ("try: sys.exit(2)\nexcept SystemExit: sys.exit(6)", 6),
        ("try: sys.exit(7)\nexcept SystemExit as error:\n kept = error\n raise", 7),
        ("sys.exit('a text')", 1),
        ("exit(5)", 5),
        ("try: quit(3)\nexcept SystemExit: pass", 0),
    ],
)
def test_a_rank_ends_with_what_sys_exit_was_called_with_unless_that_was_caught(
    program: str, code: int
) -> None:
    """As of argparse's, where a program goes on: over MPI the job failed in the end."""
    hook = (
        "from ringlet.ring.rendezvous.exit_hooks import leave_on_exception as leave\nleave(True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, threading\n{hook}{program}"],
        capture_output=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == code, done.stderr.decode()


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_of_mpi_that_joins_a_group_of_torchs_too_leaves_before_mpi_is_finalized(
    first: bool,
) -> None:
    """MPI_Finalize waits for ranks that wait for this one."""
    program = (
        "import atexit, sys\natexit.register(print, 'MPI_Finalize')\n"
        "from ringlet.ring.rendezvous.exit_hooks import leave_on_exception as leave\n"
        f"leave({first})\nleave({not first})\nsys.exit(4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout) == (4, b""), done.stderr.decode()
