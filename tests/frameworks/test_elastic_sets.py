"""Process sets in elastic jobs, and what is refused there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_elastic_sets.py")
FLAGS = ["-np", "4", "--min-np", "3", "-H", "localhost:2,127.0.0.1:2"]
FLAGS += ["--blacklist-cooldown-range", "1", "1"]


def job(flags=FLAGS, **added):
    launch = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *flags]
    plan = {"batches": 40, "until": 4, "do": {"1": 25}, "again": True, "resume": "commit"}
    plan |= {"own": False, "pair": [0, 1]} | added
    done = subprocess.run(
        [*launch, sys.executable, str(WORKER), json.dumps(plan)],
        env=os.environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("resume", "pair"), [("commit", [0, 1]), ("step", [1, 2])])
def test_a_process_set_is_added_again_by_a_callback(resume, pair):
    done, lines = job(resume=resume, own=True, pair=pair)
    assert done.returncode == 0, done.stderr
    begun = [line for line in lines if "begins" in line]
    assert [line["size"] for line in begun] == [4] * 4 + [3] * 3 + [4] * 4
    assert [line["begins"] for line in begun[4:7]] == [20] * 3
    last = [line for line in lines if "done" in line]
    assert {(line["rank"], line["equal"]) for line in last} == {
        (rank, True if rank in pair else None) for rank in range(4)
    }
    assert {line["total"] for line in last} == {4.0}
    stays = pair[-1] if pair[0] else 0  # rank 1 is lost
    (kept,) = [x for x in lines if x.get("commits") == 20 and x["started"] == stays]
    (after,) = [x for x in begun[4:7] if x["started"] == stays]
    assert after["residual"] == pytest.approx(kept["residual"], rel=1e-6)
    assert kept["residual"] > 0
    # All take over what those have trained that were in the set, whatever rank 0 holds.
    assert [line["trained"] for line in begun[4:7]] == [kept["trained"]] * 3
    assert {tuple(line["trained"]) for line in begun[7:]} == {
        tuple(x["trained"]) for x in lines
        if x["started"] == stays and x.get("commits") == begun[7]["begins"]
    }  # fmt: skip
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
    said = "state.optimizer reduces over the process set of ranks [0, 1], which is gone"
    assert f"InvalidArgument: {said}, as all sets are when ranks change; add the" in done.stderr


def test_a_process_set_of_all_ranks_that_are_left():
    done, lines = job(["-np", "3", "--min-np", "2"], until=2, do={"2": 25})
    assert done.returncode == 0, done.stderr
    assert [line["size"] for line in lines if "begins" in line] == [3] * 3 + [2] * 2
    last = [(line["rank"], line["equal"], line["total"]) for line in lines if "done" in line]
    assert sorted(last) == [(0, True, 2.0), (1, True, 2.0)]


@pytest.fixture
def told(monkeypatch):
    """Let ranks tell ``Roots`` of two optimizers of one model; return what is set of that."""
    from ringlet.torch.elastic import roots

    ranks = {"first": [0, 2], "second": [1, 2]}
    module = torch.nn.Linear(3, 2)
    owned = {"first": {"weight": module.weight}, "second": {"bias": module.bias}}
    values = {"model": module} | {
        name: SimpleNamespace(
            _ringlet=SimpleNamespace(parameters=p, process_set=SimpleNamespace(ranks=ranks[name]))
        )
        for name, p in owned.items()
    }
    monkeypatch.setattr(roots, "Reducer", SimpleNamespace)
    said = []

    def gather(own, *_):
        return [own] + [[began, sets] for began, sets in said]

    monkeypatch.setattr(roots.json_exchange, "gather", gather)
    return SimpleNamespace(said=said, find=lambda: roots.Roots().find(values, True))


def test_of_each_process_set_a_rank_that_was_in_it_is_taken_over(told):
    told.said += [
        [False, {"first": [[0, 2], False], "second": [[1, 2], False]}],  # a newcomer
        [True, {"first": [[0, 2], False], "second": [[1, 2], True]}],
        [True, {"first": [[0, 2], True], "second": [[1, 2], True]}],
    ]
    assert told.find() == {"first": 3, "second": 2, "model": 3}


def test_a_process_set_that_is_lost_as_a_whole_is_named(told):
    told.said += [[True, {"first": [[0, 2], False], "second": [[1, 2], True]}]]
    with pytest.warns(UserWarning, match="what state.first trained in its process set is lost"):
        assert told.find() == {"second": 1, "model": 1}


def test_other_process_sets_on_other_ranks_are_refused(told):
    told.said += [[True, {"first": [[2, 3], True], "second": [[1, 2], True]}]]
    said = r"state.first is an optimizer of the process set \[0, 2\] on rank 0, and of \[2, 3\] on"
    with pytest.raises(ValueError, match=f"{said} rank 1: .* give each set's model"):
        told.find()
