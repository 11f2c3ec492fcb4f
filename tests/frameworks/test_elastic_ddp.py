"""DistributedDataParallel with a hook in jobs whose ranks come and go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from elastic_jobs import begun, check_kept, epochs, job

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_elastic_ddp.py")
AGAIN = (
    "inside the function that hvd.elastic.run calls, write model = DistributedDataParallel("
    "state.model, process_group=hvd.elastic.process_group()) and model.register_comm_hook("
    "*hvd.ddp_hook(spec)), where state is a TorchState of the bare model"
)


@pytest.fixture(scope="module")
def jobs():
    """Return the outcomes of all jobs, two at a time: they spend time on waiting."""
    two_hosts = ["-np", "4", "--min-np", "3", "-H", "localhost:2,127.0.0.1:2"]
    kill = {"kill": {"1": 25}}
    plans = {
        "4 3 4": (
            [*two_hosts, "--blacklist-cooldown-range", "1", "1"],
            {"until": 4, "spec": "topk(ratio=0.1) | ef", "redundancy": 1},
        ),
        "commit": (
            ["-np", "4", "--min-np", "2"],
            {"until": 2, "spec": "topk(ratio=0.05) | ef", "making": 2},
        ),
        "step": (
            ["-np", "3", "--min-np", "2"],
            {"until": 2, "spec": "int8 | ef", "resume": "step", "plain": True},
        ),
        "kept": (
            ["-np", "2", "--min-np", "1"],
            {"until": 1, "spec": "int8 | ef", "plain": True, "keep": True},
        ),
        "unknown": (["-np", "1", "--min-np", "1"], {"until": 1, "spec": "int8", "unknown": True}),
    }
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(job, flags, {"batches": 40} | kill | plan, worker=[str(WORKER)])
            for name, (flags, plan) in plans.items()
        }
        yield lambda name: started[name].result(400)


def check_end(done, lines, size):
    assert done.returncode == 0, done.stderr
    assert all(line["equal"] for line in lines if "commits" in line or "done" in line)
    ends = [line for line in lines if "done" in line]
    assert [line["size"] for line in ends] == [size] * size
    # No DDP of an earlier epoch is left, whose hooks would still be on the parameters.
    assert [line["left"] for line in ends] == [0] * size


def test_ddp_goes_on_when_a_rank_is_killed_in_backward_and_another_joins(jobs):
    done, lines = jobs("4 3 4")
    check_end(done, lines, 4)
    first, second, third = epochs(lines)
    assert (first, second, third[0]) == ((4, 0), (3, 20), 4)
    check_kept(lines, 3, 20)
    check_kept(lines, 4, third[1])
    assert "held back on rank 1 of before goes on with rank" in done.stderr
    assert "is lost" not in done.stderr
    for line in begun(lines)[4:]:  # all count alike, the newcomer too
        assert line["steps"] == dict.fromkeys(["first.weight", "last.weight"], line["batch"])
    told = {line["started"]: line["specs"] for line in lines if "specs" in line}
    assert told == dict.fromkeys(range(4)) | {4: ["topk(ratio=0.1) | ef"]}


def test_survivors_go_on_where_another_rank_is_lost_while_ddp_is_made(jobs):
    done, lines = jobs("commit")
    check_end(done, lines, 2)
    assert epochs(lines) == [(4, 0), (3, 20), (2, 20)]
    for started in (0, 3):
        own = [line for line in lines if line["started"] == started]
        kept = next(line["held"] for line in own if line.get("commits") == 20)
        after = next(line["residual"] for line in begun(own) if line["size"] == 2)
        assert after == pytest.approx(kept, rel=1e-6)
        assert kept > 0


def test_survivors_go_on_from_the_backward_pass_at_hand(jobs):
    done, lines = jobs("step")
    check_end(done, lines, 2)
    assert epochs(lines) == [(3, 0), (2, 25)]
    after = [line for line in begun(lines) if line["size"] == 2]
    assert [line["steps"]["first.weight"] for line in after] == [25, 25]
    assert min(line["residual"] for line in after) > 0


def test_a_ddp_that_was_kept_when_ranks_changed_is_refused(jobs):
    done, lines = jobs("kept")
    assert done.returncode == 1
    assert epochs(lines) == [(2, 0), (1, 20)]
    assert (
        "RuntimeError: this DistributedDataParallel was made before ranks changed, and reduces "
        f"over ranks that are gone. Make a new one each time: {AGAIN}"
    ) in done.stderr


def test_a_model_whose_memory_nobody_keeps_is_refused(jobs):
    done, lines = jobs("unknown")
    assert done.returncode == 1
    assert "RuntimeError: ddp_hook: a parameter of shape [" in done.stderr
    assert "] belongs to no model of a TorchState, which would keep what" in done.stderr
    assert [line["refused"] for line in lines if "refused" in line] == [
        "hvd.elastic.process_group() is of the ranks that there are until ranks change, and was "
        f"called outside of the function that hvd.elastic.run decorates: {AGAIN}",
        "ddp_hook over a process group of torch's own does not go together with an elastic job: "
        f"it ends with any of its ranks; {AGAIN}",
    ]
