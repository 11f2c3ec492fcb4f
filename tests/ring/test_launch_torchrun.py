"""Scripts written for torchrun, under ``ringlet run``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringlet.ring.hosts.hosts import Seat
from ringlet.ring.launch.start import rank_environment
from ringlet.ring.processes import torchrun
from ringlet.ring.processes.torchrun import NAMES, free_port, users_own
from ringlet.ring.rendezvous.environment import Launched, detect

DEADLINE = 120.0  # seconds; generous, nothing waits for it when all is well
HAS_TORCH = importlib.util.find_spec("torch") is not None
pytestmark = [
    pytest.mark.skipif(not HAS_TORCH, reason="needs torch"),
    pytest.mark.preloaded("torch"),
]

OUTER = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "other", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("env", "asked", "kept"),
    [
        ({}, [], {}),
        ({"RANK": "3", "LOCAL_RANK": "1"}, [], {}),
        ({"MASTER_PORT": "77"}, [], {"MASTER_PORT": "77"}),
        ({"MASTER_ADDR": "a", "RANK": "0"}, [], {"MASTER_ADDR": "a"}),
        (OUTER, [], {}),
        (OUTER, ["MASTER_PORT", "PATH"], {"MASTER_PORT": "1"}),
        (OUTER, ["RANK"], {name: OUTER[name] for name in OUTER if name != "WORLD_SIZE"}),
    ],
)
def test_what_the_user_has_set_stays(
    env: dict[str, str], asked: list[str], kept: dict[str, str]
) -> None:
    assert users_own(env | {"HOME": "/"}, asked) == kept


def test_both_kinds_of_variables_agree_and_ours_wins() -> None:
    base = OUTER | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "7", "HOME": "/"}
    env = rank_environment(base, 1, 4, "gloo", "127.0.0.1:9", Seat("a", 1, 2), {})
    names = {name: value for name, value in env.items() if name in NAMES}
    assert names == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name in "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE":  # which Horovod's programs read
        assert env[f"HOROVOD_{name}"] == env[f"RINGLET_{name}"]
    assert env["HOME"] == "/"
    assert "TORCHELASTIC_RUN_ID" not in env
    expected = Launched("ringlet", 1, 4, "gloo", 1, 2, "ringlet://127.0.0.1:9")
    assert detect(env, []) == expected
    assert detect(env | OUTER | {"RANK": "no number"}, []) == expected


def test_the_port_is_one_that_the_kernel_gives_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = tmp_path / "range"
    monkeypatch.setattr(torchrun, "_RANGE", limits)
    limits.write_text("12000 65535\n")
    assert all(10000 <= free_port() < 12000 for _ in range(20))
    limits.write_text("1024\t59999\n")
    assert all(60000 <= free_port() < 65536 for _ in range(20))
    for text in ("1024 65535", "nonsense"):
        limits.write_text(text)
        assert 10000 <= free_port() < 65536
    limits.unlink()
    assert 10000 <= free_port() < 65536


def test_a_port_that_somebody_has_is_not_free() -> None:
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.create_server((address, 0)) as taken:
            assert not torchrun._free(taken.getsockname()[1])


DDP = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # DDP has to bring the parameters of rank 0 to all
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
gradient = model.module.weight.grad
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
found = {name: os.environ[name] for name in names}
found["sums"] = [gradient.sum().item(), model.module.weight.sum().item()]
sys.stdout.write(json.dumps(found) + "\\n")
sys.stdout.flush()
os._exit(0)  # torch's gloo threads outlive the group and may need an interpreter that is gone
"""


@pytest.mark.parametrize("where", ["one host", "several"])
def test_a_script_with_ddp(where: str, tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    shell = tmp_path / "shell"  # runs things here, as if ssh had done it elsewhere
    shell.write_text('#!/bin/sh\nshift\ncd /\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    options = ["-np", "2"]
    if where == "several":  # rank 0 is elsewhere: its port is not the launcher's to choose
        options = ["-H", "127.0.0.2:1,localhost:1", "--network-interface", "lo"]
        options += ["--rsh", shlex.quote(str(shell)), "-x", "MASTER_ADDR=127.0.0.1"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ringlet", "run", "--gloo", "--no-prefix", *options),
            *(sys.executable, str(script)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = sorted(map(json.loads, done.stdout.splitlines()), key=lambda found: found["RANK"])
    local = [("0", "2"), ("1", "2")] if where == "one host" else [("0", "1"), ("0", "1")]
    assert [(t["LOCAL_RANK"], t["LOCAL_WORLD_SIZE"]) for t in told] == local
    assert [(t["RANK"], t["WORLD_SIZE"]) for t in told] == [("0", "2"), ("1", "2")]
    assert {t["MASTER_ADDR"] for t in told} == {"127.0.0.1"}
    [port] = {int(t["MASTER_PORT"]) for t in told}
    assert port >= 10000
    assert told[0]["sums"] == told[1]["sums"]
    assert told[0]["sums"][0] == 12.0  # the mean of the ranks' gradients


def test_ranks_that_have_not_begun_end_when_they_are_told_to() -> None:
    """Rank 0 never reports, so rank 1 waits to hear of its port."""
    options = ["-H", "127.0.0.2:1,localhost:1", "--network-interface", "lo"]
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "ringlet", "run", "--gloo", *options),
            *("--rsh", "sh -c 'exec cat > /dev/null'", "sleep", "1000"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        wrapper = f"/proc/{job.pid}/task/{job.pid}/children"
        limit = time.monotonic() + DEADLINE
        while not any(
            b"processes.rank_wrapper" in command(pid) for pid in Path(wrapper).read_text().split()
        ):
            assert time.monotonic() < limit
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=DEADLINE)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == 130
    assert b"SIGINT passed on to every rank" in err


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
