"""Process sets in elastic jobs, and what is refused there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_elastic_sets.py")
FLAGS = ["-np", "4", "--min-np", "3", "-H", "localhost:2,127.0.0.1:2"]
FLAGS += ["--blacklist-cooldown-range", "1", "1"]


def job(flags=FLAGS, **added):
    launch = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *flags]
    plan = {"batches": 40, "until": 4, "do": {"1": 25}, "again": True, "resume": "commit"}
    plan |= {"own": False} | added
    done = subprocess.run(
        [*launch, sys.executable, str(WORKER), json.dumps(plan)],
        env=os.environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("resume", ["commit", "step"])
def test_a_process_set_is_added_again_by_a_callback(resume):
    done, lines = job(resume=resume, own=True)
    assert done.returncode == 0, done.stderr
    begun = [line for line in lines if "begins" in line]
    assert [line["size"] for line in begun] == [4] * 4 + [3] * 3 + [4] * 4
    assert [line["begins"] for line in begun[4:7]] == [20] * 3
    last = [line for line in lines if "done" in line]
    assert {(line["rank"], line["equal"]) for line in last} == {
        (0, True), (1, True), (2, None), (3, None),
    }  # fmt: skip
    assert {line["total"] for line in last} == {4.0}
    (kept,) = [x["residual"] for x in lines if x.get("commits") == 20 and x["started"] == 0]
    (after,) = [x["residual"] for x in begun[4:7] if x["started"] == 0]
    assert after == pytest.approx(kept, rel=1e-6)
    assert kept > 0
    for line in lines:
        if "refused" in line:  # the same on every rank, newcomers too
            fsdp, hsdp = line["refused"]
            assert fsdp.startswith(
                "compress_fsdp does not go together with an elastic job: a rank that is lost takes "
                "its shard of the parameters along; use DistributedOptimizer with the whole model"
            )
            assert hsdp == fsdp.replace("fsdp", "hsdp")
    assert sum("refused" in line for line in lines) == 5


@pytest.mark.parametrize("resume", ["commit", "step"])
def test_a_process_set_that_is_not_added_again_is_named(resume):
    done, lines = job(again=False, resume=resume)
    assert done.returncode == 1, done.stderr
    assert not [line for line in lines if "done" in line]
    said = "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None) is not registered; pass it"
    assert f"{said} to" in done.stderr


def test_a_process_set_of_all_ranks_that_are_left():
    done, lines = job(["-np", "3", "--min-np", "2"], until=2, do={"2": 25})
    assert done.returncode == 0, done.stderr
    assert [line["size"] for line in lines if "begins" in line] == [3] * 3 + [2] * 2
    last = [(line["rank"], line["equal"], line["total"]) for line in lines if "done" in line]
    assert sorted(last) == [(0, True, 2.0), (1, True, 2.0)]
