"""Ringlet on a real Slurm: a slurmctld and two slurmds, on hosts that are namespaces of this one.

Needs root, and the packages slurm-wlm and munge.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = socket.gethostname()
SUM = (
    "import os, socket, torch, ringlet.torch as hvd; hvd.init();"
    "total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum);"
    "print('got', hvd.rank(), hvd.size(), hvd.local_rank(), socket.gethostname(), float(total[0]))"
)


def free_ports(count):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    assert os.getuid() == 0, "these tests have to be root's"
    for program, package in (
        ("slurmctld", "slurm-wlm"),
        ("slurmd", "slurm-wlm"),
        ("munged", "munge"),
    ):
        assert shutil.which(program), f"install {package}: there is no {program}"
    home = tmp_path_factory.mktemp("slurm")
    home.chmod(0o755)
    (home / "state").mkdir()
    ctl, one, two = free_ports(3)
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o600)
    (home / "slurm.conf").write_text(
        f"""
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctl}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={HERE} Port={one} CPUs=4 RealMemory=2000
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={HERE} Port={two} CPUs=4 RealMemory=2000
PartitionName=all Nodes=n1,n2 Default=YES State=UP
""".replace("CryptoType=crypto/munge\n", "")
    )
    (home / "hosts").write_text(f"127.0.0.1 localhost n1 n2 {HERE}\n")
    env = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    munged = ["munged", "--foreground", "--force"]
    for option in ("key-file=munge.key", "socket=munge.socket", "pid-file=munge.pid",
                   "log-file=munge.log", "seed-file=munge.seed"):  # fmt: skip
        name, file = option.split("=")
        munged.append(f"--{name}={home / file}")
    processes = [subprocess.Popen(munged, env=env)]
    until(lambda: (home / "munge.socket").exists())
    config = str(home / "slurm.conf")
    processes.append(subprocess.Popen(["slurmctld", "-D", "-f", config], env=env))
    for node in ("n1", "n2"):
        (home / f"spool.{node}").mkdir()
        line = f"mount --bind {home}/hosts /etc/hosts && hostname {node}"
        line += f" && exec slurmd -D -N {node} -f {config}"
        processes.append(subprocess.Popen(["unshare", "-m", "-u", "bash", "-c", line], env=env))
    try:
        until(lambda: sinfo(env) == ["idle", "idle"])
        yield env
    finally:
        subprocess.run(["scancel", "-u", "root"], env=env, check=False)
        for process in reversed(processes):  # those that sign with munge before it
            process.terminate()
            process.wait(60)


def until(true, seconds=60):
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.1)


def sinfo(env):
    ran = subprocess.run(["sinfo", "-N", "-h", "-o", "%T"], env=env, capture_output=True, text=True)
    return ran.stdout.split()


def run(env, *command, **more):
    return subprocess.run(command, env={**env, **more}, capture_output=True, text=True, timeout=150)


def batch(env, tmp_path, script, *options):
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
    out = tmp_path / "out"
    ran = run(env, "sbatch", "--wait", "-o", str(out), *options, str(tmp_path / "job.sh"))
    return ran.returncode, out.read_text() if out.exists() else ran.stderr


def got(text):
    return sorted(re.findall(r"got (.*)", text))


ALL = [f"{rank} 4 {rank % 2} n{1 + rank // 2} 6.0" for rank in range(4)]


def test_srun_alone_starts_ranks(slurm):
    ran = run(slurm, "srun", "-N", "2", "--ntasks-per-node=2", sys.executable, "-c", SUM)
    assert got(ran.stdout) == ALL, ran.stderr


def test_ringlet_run_in_a_batch_job_uses_its_hosts(slurm, tmp_path):
    script = f'ringlet run --transport gloo {sys.executable} -c "{SUM}"'
    code, out = batch(slurm, tmp_path, script, "-N", "2", "--ntasks-per-node", "2")
    assert got(out) == ALL, out
    assert code == 0


def test_a_rank_that_fails_on_the_other_host_ends_the_batch_job_with_its_code(slurm, tmp_path):
    fail = "import os, sys, time; os.environ['RINGLET_RANK'] == '3' and sys.exit(7); time.sleep(60)"
    script = f'ringlet run --transport gloo {sys.executable} -c "{fail}"'
    code, out = batch(slurm, tmp_path, script, "-N", "2", "--ntasks-per-node", "2")
    assert code == 7
    assert "rank 3 on n2 exited with code 7" in out


def test_more_ranks_than_the_batch_job_has_are_refused(slurm, tmp_path):
    code, out = batch(slurm, tmp_path, "ringlet run -np 5 true", "-N", "2", "-n", "2")
    assert code == 2
    assert "-np 5 needs 5 slots, but this batch job has 2: n1:1, n2:1" in out


def test_nodes_started_by_srun_find_each_other(slurm):
    words = ["srun", "-N", "2", "--ntasks-per-node=1", "ringlet", "node", "--slots", "2"]
    ran = run(slurm, *words, sys.executable, "-c", SUM, RINGLET_SECRET="s" * 32)
    assert got(ran.stdout) == ALL, ran.stderr
    ran = run(
        slurm, "srun", "-N", "2", "-n", "4", "ringlet", "node", "true", RINGLET_SECRET="s" * 32
    )
    assert "srun --ntasks-per-node=1" in ran.stderr


def test_a_preempted_job_has_time_to_save(slurm, tmp_path):
    save = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('running', flush=True)\n"
        "time.sleep(100)\n"
    )
    (tmp_path / "save.py").write_text(save)
    words = ["srun", "-N", "2", "--ntasks-per-node=1", "ringlet", "node", "--slots", "1"]
    process = subprocess.Popen(
        [*words, sys.executable, str(tmp_path / "save.py")],
        env={**slurm, "RINGLET_SECRET": "s" * 32}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    heard = [process.stdout.readline() for _ in range(2)]
    assert all("running" in line for line in heard)
    jobs = run(slurm, "squeue", "-h", "-o", "%i").stdout.split()
    run(slurm, "scancel", "-s", "TERM", f"{jobs[-1]}.0")
    out, _ = process.communicate(timeout=60)
    assert out.count("saved") == 2
