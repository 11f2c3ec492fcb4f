"""How MPI's ranks are started: what they ask the launcher, and that nobody else can answer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched_jobs import Launcher, Running, until

from ringlet.ring.errors import LaunchError, ProtocolError
from ringlet.ring.launch import launch, start
from ringlet.ring.processes import pmi
from ringlet.ring.processes.pmi import Pmi, named_by, remove_segments

HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
DEADLINE = 120.0

needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")


def test_what_mpi_asks() -> None:
    pmi = Pmi([2, 1])

    def ask(rank: int, line: str) -> list[str]:
        replies = pmi.take(rank, line.encode())
        assert all(number == rank for number, _ in replies)
        return [reply.decode() for _, reply in replies]

    # Who has begun waits for its answer, at rest: in MPI_Init it would turn in circles.
    begin = "cmd=init pmi_version=1 pmi_subversion=1\n"
    assert ask(2, begin) == ask(0, begin) == []
    assert pmi.waits_in_vain([1]) == [1]
    begun = b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"
    assert pmi.take(1, begin.encode()) == [(2, begun), (0, begun), (1, begun)]
    assert pmi.waits_in_vain([1]) == []
    assert ask(0, "cmd=get_my_kvsname") == [f"cmd=my_kvsname kvsname={pmi.name}\n"]
    assert pmi.name != Pmi([2, 1]).name  # MPI names shared memory after it
    assert ask(0, "cmd=get_universe_size") == ["cmd=universe_size size=3\n"]
    mapping = "cmd=get kvsname=job key=PMI_process_mapping"
    found = "cmd=get_result rc=0 msg=success value="
    assert ask(1, mapping) == [f"{found}(vector,(0,1,2),(1,1,1))\n"]
    assert ask(1, "cmd=get kvsname=job key=x") == [
        "cmd=get_result rc=-1 msg=key_not_found value=unknown\n"
    ]
    assert ask(0, "cmd=put kvsname=job key=x value=a#b=c$") == ["cmd=put_result rc=0 msg=success\n"]
    assert ask(1, "cmd=get kvsname=job key=x") == [f"{found}a#b=c$\n"]
    assert ask(1, "mcmd=spawn") == ask(1, "nprocs=1") == []
    assert ask(1, "endcmd") == ["cmd=spawn_result rc=-1 msg=not_supported\n"]
    assert ask(0, "cmd=barrier_in") == ask(2, "cmd=barrier_in") == []
    out = b"cmd=barrier_out rc=0\n"
    assert pmi.take(1, b"cmd=barrier_in") == [(0, out), (1, out), (2, out)]
    assert ask(0, "cmd=barrier_in") == []  # the next one
    assert ask(0, "cmd=abort exitcode=7") == ask(1, "cmd=abort exitcode=0") == []
    assert pmi.aborted == {0: 7, 1: 1}
    assert ask(0, "cmd=publish_name service=x") == ["cmd=publish_result rc=-1 msg=not_supported\n"]
    for odd in ("cmd=a+b", "", "\0\xff", "x" * 9999):
        with pytest.raises(ProtocolError, match="which is no command of PMI 1"):
            ask(0, odd)


@pytest.mark.parametrize(
    ("nodes", "blocks"),
    [
        ([2, 2, 3], "(0,2,2),(2,1,3)"),
        ([8] * 128, "(0,128,8)"),
        ([1, 2] * 60, None),  # longer than a value may be: MPI compares names of hosts
    ],
)
def test_hosts_with_as_many_ranks_are_told_of_at_once(nodes: list[int], blocks: str | None) -> None:
    ((_, told),) = Pmi(nodes).take(0, b"cmd=get kvsname=job key=PMI_process_mapping")
    found = "rc=-1" if blocks is None else f"value=(vector,{blocks})"
    assert found in told.decode()


SOCKETS = """
import json, os
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
listening = {}
for line in [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]:
    words = line.split()
    if words[3] == "0A":
        listening[words[9]] = words[1]
found = []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if MARK.encode() not in file.read():
                continue
        for name in os.listdir(f"/proc/{pid}/fd"):
            where = os.readlink(f"/proc/{pid}/fd/{name}")
            if where.startswith("socket:") and where[8:-1] in listening:
                found.append(listening[where[8:-1]].split(":")[0])
    except OSError:
        pass
print(json.dumps(sorted(set(found))), flush=True)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.mpi
@needs_mpi
def test_nothing_of_a_job_on_one_host_listens_on_the_network() -> None:
    code = SOCKETS.replace("MARK", repr("RINGLET_TEST_LISTEN=1"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ringlet", "run", "-np", "2", "--mpi", "--no-prefix"),
            *(sys.executable, "-c", code),
        ],
        env={"RINGLET_TEST_LISTEN": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert json.loads(line) == ["0100007F"]  # 127.0.0.1: the launcher, and what MPI may use


INHERITED = """
import os, socket
sockets = [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
links = {n: os.readlink(f"/proc/self/fd/{n}") for n in sockets}
found = [n for n, link in links.items() if link.startswith("socket:")]
print(found == [os.environ["PMI_FD"]])
"""


@pytest.mark.mpi
@needs_mpi
def test_a_rank_inherits_the_one_socket_that_mpi_needs(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([sys.executable, "-c", INHERITED], 2, "mpi", prefix=False) == 0
    assert capfd.readouterr().out == "True\nTrue\n"


IN_INIT = """
import os, time
if os.environ["PMI_RANK"] == "0":
    from mpi4py import MPI
os.write(int(os.environ["PMI_FD"]), b"cmd=init pmi_version=1 pmi_subversion=1\\n")  # and no more
while True:
    time.sleep(1)
"""


def segments(running: Running) -> set[str]:
    """Return the files of shared memory that MPI's ranks have."""
    found: set[str] = set()
    for pid in running.pids("mpi4py"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/maps").read_text().split()
            found.update(word for word in words if word.startswith("/dev/shm/mpich_shm_"))
    return found


@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])  # the latter for the launcher
def test_a_job_that_ends_within_mpi_init_leaves_no_shared_memory(
    ringlet: Launcher, end: signal.Signals
) -> None:
    """Ranks take its name away behind MPI_Init. A container has 64 MB."""
    running = ringlet(IN_INIT, 2, "mpi", command=[sys.executable, "-c"])
    files = until(lambda: segments(running))
    assert all(map(os.path.exists, files))
    running.process.send_signal(end)
    running.end()
    assert not any(map(os.path.exists, files))


def test_only_memory_of_this_user_and_job_is_taken_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pmi, "_MEMORY", tmp_path)
    mine, others = tmp_path / "mpich_shm_41746fa8_0", tmp_path / "mpich_shm_41746fa9_0"
    for path in (mine, others):
        path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: mine.stat().st_uid + 1)
        remove_segments("ringlet_a")
    assert mine.exists()
    remove_segments("ringlet_a")
    remove_segments("ringlet_a")
    assert [*tmp_path.iterdir()] == [others]
    short = tmp_path / "mpich_shm_2d60ef2_0"  # MPICH leaves zeros in front away
    short.touch()
    remove_segments("ringlet_0d63135a85b8fc6aa2bdc6807699c3ce")
    assert [*tmp_path.iterdir()] == [others]
    assert named_by(b"cmd=my_kvsname kvsname=ringlet_a\n") == "ringlet_a"
    assert named_by(b"cmd=get_result rc=0 kvsname=other value=\xff\n") == ""


@pytest.mark.mpi
@needs_mpi
def test_the_mpiexec_of_another_mpi_starts_its_ranks_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "is_mpich", lambda seconds: False)
    code = "from mpi4py import MPI\nc = MPI.COMM_WORLD\nprint(c.allreduce(c.rank))\n"
    assert launch([sys.executable, "-c", code], 2, "mpi", prefix=False) == 0
    assert capfd.readouterr().out == "1\n1\n"
    code += "if c.rank == 1: c.Abort(7)\nc.Barrier()\n"
    assert launch([sys.executable, "-c", code], 2, "mpi", prefix=False) == 7
    assert "mpiexec ended every rank with code 7, as after MPI_Abort\n" in capfd.readouterr().err


@needs_mpi
def test_an_mpiexec_may_have_for_ever_to_answer() -> None:
    assert start.is_mpich(31536000.0) == start.is_mpich(60.0)


def test_an_mpiexec_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "mpiexec"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    monkeypatch.setattr(start, "mpiexec", lambda: str(silent))
    with pytest.raises(LaunchError, match=r"did not answer within 0\.2 s \(see --start-timeout\)"):
        start.is_mpich(0.2)
