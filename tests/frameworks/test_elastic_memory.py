"""Elastic jobs keep masters, loss scales, compression and DiLoCo's parameters, but no factors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_elastic_memory.py")
# Of two hosts so that a failed one, when it may be used again, brings a newcomer.
FLAGS = ["-np", "4", "--min-np", "3", "-H", "localhost:2,127.0.0.1:2"]
FLAGS += ["--blacklist-cooldown-range", "1", "1"]
KINDS = ["fp16", "diloco", "powersgd", "onebit", "switched"]


def job(plan, flags=FLAGS):
    launch = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *flags]
    done = subprocess.run(
        [*launch, sys.executable, str(WORKER), json.dumps(plan)],
        env=os.environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def jobs():
    """Return the outcomes of all jobs, two at a time: they spend time on waiting."""
    with ThreadPoolExecutor(2) as pool:
        plan = {"batches": 40, "until": 4, "do": {"1": 25}}
        started = {kind: pool.submit(job, plan | {"kind": kind}) for kind in KINDS}
        plan |= {"kind": "fp16", "resume": "step"}
        started["step"] = pool.submit(job, plan)
        plan = {"kind": "fp16", "gradients": True, "batches": 4, "until": 1, "do": {"1": 2}}
        flags = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1"]
        started["alone"] = pool.submit(job, plan, flags)
        yield lambda name: started[name].result(400)


@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_have_in_common_outlives_them_and_reaches_newcomers(jobs, kind):
    done, lines = jobs(kind)
    assert done.returncode == 0, done.stderr
    assert [line["equal"] for line in lines if "done" in line] == [True] * 4
    begun = [line for line in lines if "begins" in line]
    assert len(begun) == 4 + 3 + 4
    assert begun[4]["begins"] == 20
    commits = {(x["started"], x["commits"]): x["memory"] for x in lines if "commits" in x}
    alone = {"model", "moments"} if kind == "diloco" else set()  # what ranks do not agree on
    for line in begun[4:]:
        memory, at = line["memory"], line["begins"]
        own = commits.get((line["started"], at))
        if own is not None:
            assert memory == own
        else:
            assert line["started"] > 3
            assert line["residual"] == 0
            others = commits[2, at]
            assert {k: v for k, v in memory.items() if k not in alone} == {
                k: v for k, v in others.items() if k not in alone
            }


def test_factors_begin_anew_on_all_ranks_alike(jobs):
    _, lines = jobs("powersgd")
    assert {line["factors"] for line in lines if "begins" in line} == {0}
    assert all(line["factors"] for line in lines if "commits" in line)


def test_masters_go_on_from_the_step_at_hand(jobs):
    done, lines = jobs("step")
    assert done.returncode == 0, done.stderr
    begun = [line for line in lines if "begins" in line]
    assert [line["begins"] for line in begun[4:7]] == [25] * 3
    assert len({json.dumps(line["memory"]) for line in begun[4:7]}) == 1
    assert [line["equal"] for line in lines if "done" in line] == [True] * 4


def test_masters_are_given_float32_without_the_scale_also_where_one_rank_is_left(jobs):
    done, lines = jobs("alone")
    assert done.returncode == 0, done.stderr
    told = [(line["size"], line["given"]) for line in lines if "given" in line]
    assert {size for size, _ in told} == {2, 1}
    assert max(off for _, off in told) < 2.0**-10, told
