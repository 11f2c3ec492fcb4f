"""Elastic jobs that train with ringlet.jax: real processes, killed and added."""

from __future__ import annotations

import pytest
from elastic_jobs import begun, check_step, epochs, job

pytestmark = pytest.mark.preloaded("jax")


def test_training_goes_on_from_the_last_commit():
    plan = {"batches": 40, "do": {"0": [25, "SIGKILL"]}, "spec": "topk(ratio=0.1) | ef"}
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "jax")
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    for started in (1, 2):  # each goes on with what it held back itself
        own = [line for line in lines if line["started"] == started]
        committed = next(line["residual"] for line in own if line.get("committed") == 20)
        assert committed > 0
        assert begun(own)[1]["residual"] == pytest.approx(committed, rel=1e-6)
    assert [line["equal"] for line in lines if "done" in line] == [True, True]


@pytest.mark.parametrize("donate", [False, True])
def test_training_goes_on_from_the_step_at_hand(donate):
    """From the commit, where the step has been given its arguments' memory."""
    do, spec = {"1": [25, "SIGKILL"]}, "topk(ratio=0.1) | ef"
    plan = {"batches": 40, "do": do, "resume": "step", "spec": spec, "donate": donate}
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "jax")
    assert done.returncode == 0, done.stderr
    if donate:
        assert epochs(lines) == [(3, 0), (2, 20)]
        assert [line["equal"] for line in lines if "done" in line] == [True, True]
    else:
        check_step(lines)


def test_ranks_that_come_take_over_the_state(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    grow = {"2": "localhost:2\n127.0.0.1:1\n"}
    plan = {"batches": 40, "until": 3, "hosts": grow, "file": str(hosts)}
    flags = ["-np", "2", "--min-np", "2", "--host-discovery-script", f"cat {hosts}"]
    done, lines = job(flags, plan, "jax")
    assert done.returncode == 0, done.stderr
    assert [line["size"] for line in lines if "done" in line] == [3, 3, 3]
    assert all(line["equal"] for line in lines if "done" in line)
    newcomer = [line for line in begun(lines) if line["size"] == 3 and not line["residual"]]
    assert len(newcomer) == 1
    assert newcomer[0]["batch"] >= 10
