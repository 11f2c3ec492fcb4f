"""Jobs whose ranks come and go: real processes, killed, frozen, added and taken away."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import netns
import numpy as np
import pytest
from elastic_jobs import WORKER, begun, check_step, epochs, job
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays

from ringlet.compressors import parse
from ringlet.job import elastic, warm_up
from ringlet.ring.errors import PeerLost, ProtocolError

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")

missing = netns.unavailable()
TWO_HOSTS = ["-H", "localhost:2,127.0.0.1:2"]


@pytest.fixture
def measured(record_property):
    """Return a function that records how soon after a rank's end the last survivor stepped."""

    def record(lines, what):
        ended = next(line["ends"] for line in lines if "ends" in line)
        steps = [line["stepped"] for line in lines if line.get("stepped", 0) > ended]
        record_property("measured", f"{what}: next step after {max(steps) - ended:.2f} s")

    return record


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the outcomes of all jobs, two at a time: they spend time on waiting."""
    hosts = tmp_path_factory.mktemp("elastic") / "hosts"
    grown, replaced = hosts.with_name("grown"), hosts.with_name("replaced")
    joined = hosts.with_name("joined")
    os.mkfifo(hosts.with_name("fifo"))
    joined.write_text("localhost:1\n127.0.0.1:1\n")
    for file in (hosts, grown, replaced):
        file.write_text("localhost:2\n")
    grow = {"2": "localhost:2\n127.0.0.1:1\n", "3": "127.0.0.1:1\n"}
    plans = {
        "host": (["-np", "4", "--min-np", "2", *TWO_HOSTS], {"do": {"0": [25, "SIGKILL"]}}),
        "one host": (["-np", "3", "--min-np", "2"], {"do": {"1": [25, "exit"]}}),
        "frozen": (
            ["-np", "3", "--min-np", "2", "--heartbeat-seconds", "1"],
            {"do": {"2": [25, "SIGSTOP"]}},
        ),
        "step": (
            ["-np", "3", "--min-np", "2", "--output-filename", str(hosts.parent / "out")],
            {"do": {"1": [25, "SIGKILL"]}, "resume": "step"},
        ),
        "different": (
            ["-np", "3", "--min-np", "2"],
            {"do": {"1": [25, "SIGKILL"]}, "resume": "step", "own": True, "rate": True},
        ),
        "called": (
            ["-np", "4", "--min-np", "2"],
            {"do": {"1": [25, "SIGKILL"]}, "resume": "step", "rate": True, "called": [3, 2]},
        ),
        "torn": (
            ["-np", "3", "--min-np", "2"],
            {"torn": [30, 0, 2], "fifo": str(hosts.with_name("fifo")), "spec": "topk | ef"},
        ),
        "twice": (
            ["-np", "3", "--min-np", "1", "--reset-limit", "1"],
            {"do": {"0": [25, "SIGKILL"], "1": [35, "SIGKILL"]}},
        ),
        "too few": (["-np", "2", "--min-np", "2"], {"do": {"0": [25, "SIGKILL"]}}),
        "changing": (
            ["-np", "2", "--min-np", "1", "--host-discovery-script", f"cat {hosts}"],
            {"hosts": grow, "file": str(hosts), "until": 1, "spec": "topk(ratio=0.1) | ef"},
        ),
        "frozen between": (
            [
                "-np",
                "2",
                "--min-np",
                "1",
                "--heartbeat-seconds",
                "1",
                "--host-discovery-script",
                f"cat {grown}",
            ],
            {
                "hosts": {"2": "localhost:2\n127.0.0.1:2\n"},
                "file": str(grown),
                "freeze": 1,
                "until": 3,
            },
        ),
        "frozen seated": (
            ["-np", "3", "--min-np", "1", "--heartbeat-seconds", "1"],
            {"do": {"0": [25, "SIGKILL"]}, "seated": 2},
        ),
        "frozen beside newcomers": (
            [
                "-np",
                "2",
                "--min-np",
                "2",
                "--heartbeat-seconds",
                "1",
                "--host-discovery-script",
                f"cat {joined}",
            ],
            {
                "hosts": {"2": "localhost:3\n127.0.0.1:1\n"},
                "file": str(joined),
                "seated": 0,
                "until": 3,
            },
        ),
        "killed joining": (
            ["-np", "4", "--min-np", "2", "--heartbeat-seconds", "1"],
            {"do": {"2": [25, "SIGKILL"]}, "joining": [1, "SIGKILL"]},
        ),
        "frozen joining": (
            ["-np", "4", "--min-np", "2", "--heartbeat-seconds", "1"],
            {"do": {"2": [25, "SIGKILL"]}, "joining": [1, "SIGSTOP"]},
        ),
        "replaced": (
            [
                "-np",
                "2",
                "--min-np",
                "1",
                "--host-discovery-script",
                f"echo warned >&2; cat {replaced}",
            ],
            {"hosts": {"2": grow["3"]}, "file": str(replaced), "until": 1},
        ),
    }
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(job, flags, {"batches": 50} | plan)
            for name, (flags, plan) in plans.items()
        }
        yield lambda name: started[name].result(400)


def test_training_goes_on_when_a_host_loses_its_rank_0(jobs, measured):
    done, lines = jobs("host")
    assert done.returncode == 0, done.stderr
    measured(lines, "rank 0 killed, its host left")
    assert epochs(lines) == [(4, 0), (2, 20)]
    last = [line for line in lines if "done" in line]
    assert [(x["host"], x["equal"], x["batch"]) for x in last] == [("127.0.0.1", True, 50)] * 2
    assert sorted((x["started"], x["rank"]) for x in last) == [(2, 0), (3, 1)]
    assert "rank 0 on localhost was ended by signal 9 (SIGKILL); no rank is" in done.stderr


def test_survivors_of_the_only_host_go_on_with_what_compression_held_back(jobs, measured):
    done, lines = jobs("one host")
    assert done.returncode == 0, done.stderr
    measured(lines, "a rank exits")
    assert epochs(lines) == [(3, 0), (2, 20)]
    for started in (0, 2):
        own = [line for line in lines if line["started"] == started]
        committed = next(x["residual"] for x in own if x.get("committed") == 20)
        after = next(x["residual"] for x in own if x.get("size") == 2)
        assert committed > 0
        assert after == pytest.approx(committed, rel=1e-6)


def test_what_ranks_print_is_kept_by_process(jobs, tmp_path_factory):
    _, lines = jobs("step")
    out = tmp_path_factory.getbasetemp() / "elastic0/out"
    for started in range(3):
        kept = (out / f"rank.{started}/stdout").read_text().splitlines()
        assert [json.loads(x) for x in kept] == [x for x in lines if x["started"] == started]


def test_survivors_go_on_from_the_step_at_hand(jobs, measured):
    done, lines = jobs("step")
    assert done.returncode == 0, done.stderr
    measured(lines, "a rank killed, on from the step at hand")
    check_step(lines)
    (held,) = [x["norm"] for x in lines if x.get("committed") == 20 and x["started"] == 1]
    lost = f"what compression held back on rank 1 is lost: gradients of norm {held:.3g}, at its"
    assert lost in done.stderr
    assert not any(line["stale"] for line in begun(lines))


def test_survivors_that_differ_go_back_to_the_commit(jobs):
    done, lines = jobs("different")
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    for started in (0, 2):
        own = [line for line in lines if line["started"] == started]
        committed = next(x["residual"] for x in own if x.get("committed") == 20)
        after = next(x["residual"] for x in own if x.get("size") == 2)
        assert after == pytest.approx(committed, rel=1e-6)
    assert [line["equal"] for line in lines if "done" in line] == [True, True]


@pytest.mark.parametrize("name", ["different", "called"])
def test_a_learning_rate_that_a_reset_callback_sets_stays(jobs, name):
    _, lines = jobs(name)
    sizes = [line["size"] for line in begun(lines)]
    assert set(sizes) == {2, 3 if name == "different" else 4}
    rates = [line["rate"] for line in begun(lines)]
    assert rates == pytest.approx([0.01 * size for size in sizes])


def test_survivors_do_not_differ_by_what_callbacks_of_some_of_them_did(jobs):
    done, lines = jobs("called")
    assert done.returncode == 0, done.stderr
    assert "epoch 2: 3 ranks" in done.stderr  # of which one is killed in its callback
    assert epochs(lines) == [(4, 0), (2, 25)]
    assert [line["equal"] for line in lines if "done" in line] == [True, True]


def survivor(own):
    """Return what joins others for a rank that holds ``own``, and its state, at batch 3."""
    state = elastic.ObjectState(batch=1)
    state.batch = 3
    training = elastic._Training(state, "step", 0)
    training._own = own
    return training, state


@pytest.mark.parametrize(
    ("told", "batch", "agreed"),
    [
        ([["a"], ["a"], []], 3, ["a"]),  # the last one is new
        ([["a"], ["b"]], 1, ["epoch 7"]),
        ([["b", "a"], ["a"]], 3, ["a"]),  # a callback has made "b" of "a"
        ([["a", "b"], ["c", "b"]], 3, ["b"]),  # others have joined, and one has not
        ([["a", "b"], ["a", "b"]], 3, ["a"]),
        ([["a", "b"], ["a"], ["b"]], 1, ["epoch 7"]),
    ],
)
def test_survivors_go_back_unless_they_know_their_state_by_one_name(
    monkeypatch, told, batch, agreed
):
    monkeypatch.setattr(elastic.epochs, "present", lambda: 7)
    for names in told:
        training, state = survivor(names)
        training._go_back_unless_alike(told)
        assert (state.batch, training._agreed) == ((batch, agreed) if names else (3, []))
        assert training._own == []


def test_survivors_that_hosts_interrupted_agree_on_where_they_are(monkeypatch):
    monkeypatch.setattr(elastic.epochs, "present", lambda: 7)
    training, state = survivor([])
    training._go_back_unless_alike([[], []])
    assert (state.batch, training._agreed) == (3, ["epoch 7"])


@pytest.mark.parametrize("wrong", [None, "a", {"a": 1}, [1], [["a"]], ["a"] * 3, 5])
def test_a_rank_that_tells_no_fingerprints_is_named(wrong):
    training, state = survivor(["a"])
    with pytest.raises(ProtocolError, match=r"rank 1 sent .* where fingerprints are expected"):
        training._go_back_unless_alike([["a"], wrong])
    assert state.batch == 3


def test_survivors_go_back_to_one_commit_where_one_alone_has_done_the_step_before(jobs):
    done, lines = jobs("torn")
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    assert [x["started"] for x in lines if x.get("commits") == 30 and x["size"] == 3] == [1]
    for started in (0, 1):
        own = [line for line in lines if line["started"] == started]
        committed = next(x["residual"] for x in own if x.get("committed") == 20)
        after = next(x["residual"] for x in begun(own) if x["size"] == 2)
        assert after == pytest.approx(committed, rel=1e-6)


def test_a_frozen_rank_is_ended_and_the_others_go_on(jobs, measured):
    done, lines = jobs("frozen")
    assert done.returncode == 0, done.stderr
    measured(lines, "a rank frozen, heartbeat 1 s")
    assert epochs(lines) == [(3, 0), (2, 20)]
    said = "rank 2 on localhost was lost by the others, did not come forward, and was killed"
    assert said in done.stderr


def test_the_reset_limit_ends_the_job_with_the_cause(jobs):
    done, lines = jobs("twice")
    assert done.returncode == 137, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    assert "rank 0 on localhost was ended by signal 9 (SIGKILL); --reset-limit 1 is" in done.stderr


def test_too_few_ranks_end_the_job(jobs):
    done, lines = jobs("too few")
    assert done.returncode == 137, done.stderr
    assert epochs(lines) == [(2, 0)]
    said = "rank 0 on localhost was ended by signal 9 (SIGKILL); ending the other ranks\n"
    assert said in done.stderr


SAYS_WHY = """
import os, signal, sys, time
there = sys.argv[1]
if os.environ["RINGLET_MEMBER"] == "0":
    while not os.path.exists(there):
        time.sleep(0.01)
    sys.exit("the cause")
signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
open(there, "w").close()
signal.pause()
"""


def test_what_ended_the_job_is_said_again_behind_what_others_print(tmp_path):
    launch = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--min-np", "2"]
    done = subprocess.run(
        [*launch, sys.executable, "-c", SAYS_WHY, str(tmp_path / "there")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "told to end" in done.stderr
    assert done.stderr.endswith(
        "ringlet run: process 0 failed first; its last lines were:\nringlet run: | the cause\n"
    )


def test_hosts_come_and_go_without_going_back(jobs):
    done, lines = jobs("changing")
    assert done.returncode == 0, done.stderr
    sizes = [size for size, _ in epochs(lines)]
    assert sizes == [2, 3, 1]
    (last,) = [line for line in lines if "done" in line]
    assert (last["host"], last["rank"], last["equal"]) == ("127.0.0.1", 0, True)
    first = {x["started"] for x in begun(lines) if x["batch"] == 0}
    for line in lines:  # newcomers know what to load before they ask for a rank
        if "specs" in line:
            expected = None if line["started"] in first else ["none", "topk(ratio=0.1) | ef"]
            assert line["specs"] == expected
    # Nothing was lost: an epoch begins where the last commit of the one before was.
    assert [batch % 10 for _, batch in epochs(lines)] == [0, 0, 0]
    alone = next(line for line in begun(lines) if line["size"] == 1)
    assert alone["batch"] > 0
    for rank in (0, 1):  # of the host that has gone
        assert f"what compression held back on rank {rank} is lost: gradients" in done.stderr


def test_who_freezes_while_ranks_are_numbered_anew_is_ended(jobs):
    done, lines = jobs("frozen between")
    assert done.returncode == 0, done.stderr
    assert "rank 1 on localhost keeps the others waiting, and gave no sign of life" in done.stderr
    last = [line for line in lines if "done" in line]
    assert {(line["host"], line["equal"]) for line in last} >= {("localhost", True)}
    assert {line["started"] for line in begun(lines) if line["batch"] > 0} == {0, 2, 3}


def test_who_freezes_before_it_meets_the_others_is_ended(jobs, measured):
    done, lines = jobs("frozen seated")
    assert done.returncode == 0, done.stderr
    assert "rank 1 on localhost keeps the others waiting, and gave no sign of life" in done.stderr
    assert [size for size, _ in epochs(lines)] == [3, 1]  # of epoch 2 nothing came
    (last,) = [line for line in lines if "done" in line]
    assert (last["started"], last["equal"]) == (1, True)
    # Nothing travels from one rank that is left: its first step has taken what it held back.
    norms = {line["committed"]: line["norm"] for line in lines if "committed" in line}
    assert norms[20] > 0 == norms[50]
    measured(lines, "a rank killed, another frozen before it meets the third, heartbeat 1 s")


def test_newcomers_without_the_state_do_not_take_the_place_of_rank_0(jobs):
    done, lines = jobs("frozen beside newcomers")
    assert done.returncode == 0, done.stderr
    first, *later = epochs(lines)  # of epoch 2 nothing came
    assert first == (2, 0)
    assert min(batch for _, batch in later) >= 10  # at a commit, and not at the start
    last = sorted((x["rank"], x["started"], x["equal"]) for x in lines if "done" in x)
    assert last[0][:2] == (0, 1)
    assert [equal for *_, equal in last] == [True] * 3


@pytest.mark.parametrize("how", ["killed joining", "frozen joining"])
def test_who_is_lost_between_meeting_the_others_and_the_control_plane(jobs, measured, how):
    done, lines = jobs(how)
    assert done.returncode == 0, done.stderr
    assert [size for size, _ in epochs(lines)] == [4, 2]  # of epoch 2 nothing came
    last = [(line["started"], line["equal"]) for line in lines if "done" in line]
    assert sorted(last) == [(0, True), (3, True)]
    measured(lines, f"a rank killed, another {how} the control plane, heartbeat 1 s")


def test_a_script_may_replace_all_hosts_at_once(jobs):
    done, lines = jobs("replaced")
    assert done.returncode == 0, done.stderr
    assert [size for size, _ in epochs(lines)] == [2, 3, 1]
    (last,) = [line for line in lines if "done" in line]
    assert (last["host"], last["equal"]) == ("127.0.0.1", True)
    assert [batch % 10 for _, batch in epochs(lines)] == [0, 0, 0]  # nothing was lost


def test_a_killed_launcher_ends_all_ranks_and_that_is_said():
    plan = json.dumps({"batches": 1 << 60})
    launch = [sys.executable, "-m", "ringlet", "run", "--no-prefix", "-np", "3", "--min-np", "1"]
    running = subprocess.Popen(
        [*launch, sys.executable, str(WORKER), "torch", plan],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert any("committed" in line for line in running.stdout)  # until then nothing is lost
    running.kill()
    _, said = running.communicate(timeout=60)  # their end closes what they would speak to
    assert said.count("the launcher has ended without a word, such as by SIGKILL") == 1
    assert said.endswith("all its ranks are killed. What was saved to files is left to start again "
                         "from\n")  # fmt: skip


@pytest.mark.skipif(missing is not None, reason=str(missing))
def test_a_script_names_hosts_elsewhere(tmp_path):
    listed = tmp_path / "hosts"
    listed.write_text("node0:1\n")
    plan = {
        "batches": 30, "until": 2, "file": str(listed), "hosts": {"1": "node0:1\nnode1:1\n"},
    }  # fmt: skip
    with netns.Hosts(3) as hosts:
        flags = ["-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {listed}"]
        flags += ["--rsh", hosts.rsh, "--network-interface", netns.INTERFACE]
        done, lines = job(flags, plan, command=lambda words: hosts.command(2, words))
    assert done.returncode == 0, done.stderr
    assert [size for size, _ in epochs(lines)] == [1, 2]
    assert sorted(x["host"] for x in lines if "done" in x) == ["node0", "node1"]


@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.parametrize("cut", [[0], [1, 2]])
def test_hosts_that_are_cut_off_are_given_up(cut, measured):
    do = {str(i): [25, netns.INTERFACE] for i in cut}
    plan = {"batches": 40, "do": {**do, "3": [25, "tell"]}}  # what those say may not arrive
    with netns.Hosts(5) as hosts:
        flags = ["-np", "4", "--min-np", "2", "--heartbeat-seconds", "1"]
        flags += ["-H", ",".join(f"node{i}:1" for i in range(4))]
        flags += ["--rsh", hosts.rsh, "--network-interface", netns.INTERFACE]
        done, lines = job(flags, plan, command=lambda words: hosts.command(4, words))
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(4, 0), (4 - len(cut), 20)]
    measured(lines, f"hosts cut off: {len(cut)}, of rank {cut[0]} at first, heartbeat 1 s")
    assert done.stderr.count("was killed together with its wrapper, or its host cannot be") >= 1
    assert [line["equal"] for line in lines if "done" in line] == [True] * (4 - len(cut))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--min-np", "2", "-np", "1"], "--min-np 2 is more than -np 1"),
        (["--max-np", "2", "-np", "3"], "-np 3 is more than --max-np 2"),
        (["--min-np", "x", "-np", "3"], "--min-np takes a number of at least 1, not 'x'"),
        (["--min-np", "1", "--transport", "mpi", "-np", "2"], "library ends every rank when one"),
        (
            ["--min-np", "1", "-H", "localhost:1", "--host-discovery-script", "x"],
            "give --hosts or --host-discovery-script, not both",
        ),
        (
            ["--min-np", "1", "-np", "2", "--blacklist-cooldown-range", "9", "3"],
            "takes two numbers of seconds, the least first, not 9 3",
        ),
        (["--min-np", "3", "-H", "localhost:2"], "but --hosts have 2 slots"),
        (["--host-discovery-script", "x"], "needs -np or --min-np"),
    ],
)
def test_flags_that_make_no_sense_are_named(flags, said):
    command = [sys.executable, "-m", "ringlet", "run", *flags, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("method", ["sync", "commit"])
def test_nothing_is_saved_before_all_ranks_have_come(monkeypatch, method):
    def lost(name, value):
        raise PeerLost("rank 1 is gone", (1,))

    monkeypatch.setattr(elastic.epochs, "is_elastic", lambda: True)
    monkeypatch.setattr(elastic.topology, "rank", lambda: 1)
    monkeypatch.setattr(elastic, "_largest", lost)
    state = elastic.ObjectState(lambda mine: {"batch": 7}, batch=1)
    state.batch = 3
    with pytest.raises(PeerLost):
        getattr(state, method)()
    state.restore()
    assert state.batch == 1


def test_horovods_programs_can_wait_for_a_change_of_hosts(monkeypatch):
    state = elastic.ObjectState()
    assert state._host_messages.empty()  # in a job whose ranks stay
    monkeypatch.setattr(elastic.epochs, "is_elastic", lambda: True)
    for changes in (0, 2):
        monkeypatch.setattr(elastic.epochs, "changes", lambda told=changes: told)
        assert state._host_messages.empty() == (changes == 0)


def test_a_state_that_cannot_go_on_from_a_step_says_so():
    class Own(elastic.State):
        save = restore = sync = lambda self: None

    with pytest.raises(TypeError, match="Own can only go back to commits: use"):
        elastic.run(resume="step")(lambda state: None)(Own())
    with pytest.raises(ValueError, match='resume must be "commit" or "step", not \'batch\''):
        elastic.run(resume="batch")


def test_what_cannot_be_compared_is_found_out_at_once():
    state = elastic.ObjectState(lock=None)
    state.lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        elastic.run(resume="step")(lambda state: None)(state)


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | arrays(st.sampled_from(["f4", "i8", "bool"]), array_shapes(max_dims=2, max_side=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def turned(value):
    """Return the same in dicts of the opposite order, and in arrays of another memory layout."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [turned(each) for each in value]
    return np.asfortranarray(value) if isinstance(value, np.ndarray) else value


@given(VALUES)
def test_states_are_alike_if_their_values_are(value):
    assert elastic._fingerprint(turned(value)) == elastic._fingerprint(value)


@given(arrays("f4", st.integers(1, 50)), st.data())
def test_one_bit_tells_states_apart(array, data):
    other = array.copy()
    other.view(np.uint8)[data.draw(st.integers(0, array.nbytes - 1))] ^= 1
    one, two = ({"model": {"w": each}, "batch": 3} for each in (array, other))
    assert elastic._fingerprint(one) != elastic._fingerprint(two)
    assert elastic._fingerprint(one) != elastic._fingerprint(one | {"batch": 4})


def test_a_newcomer_loads_what_it_can(monkeypatch, caplog):
    loaded = []
    monkeypatch.setattr(warm_up, "loads", [lambda: loaded.append(gc.isenabled())])
    used = []
    kind = type(parse("int8"))
    monkeypatch.setattr(kind, "warm_up", lambda self, ctx: used.append(str(self)))
    with caplog.at_level("DEBUG", "ringlet"):
        warm_up.warm_up(["no such thing", "int8"])
    assert (loaded, used) == ([False], ["int8"])
    assert "no kernels were loaded for 'no such thing'" in caplog.text


# Its interpreter takes longer to end than a rank that others lost has to come forward.
ENDS_LATE = """
import atexit, sys, time
{}
import torch, ringlet.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0)
@hvd.elastic.run
def train(state):
    while state.step < 10:
        hvd.allreduce(torch.ones(2), name="x")
        state.step += 1
        state.commit()
        if state.step == 5 and hvd.rank() == 1:
            {}
train(state)
"""


LATE = {
    "in the end": "atexit.register(time.sleep, 2.5)",
    "once the others have lost it": """
from ringlet.ring.rendezvous.exit_hooks import _Leaving
leave = _Leaving.leave
_Leaving.leave = lambda self: (time.sleep(2), leave(self))
""",
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("how", "code"), [("raise ValueError('mine')", 1), ("sys.exit(3)", 3)])
def test_a_rank_that_an_error_ends_slowly_is_no_lost_one(how, code, late):
    program = ENDS_LATE.format(LATE[late], how)
    done, _ = job(["-np", "2", "--min-np", "2"], {}, worker=["-c", program])
    assert done.returncode == code, done.stderr
    said = f"rank 1 on localhost exited with code {code}; ending the other ranks\n"
    assert said in done.stderr
    assert "was killed" not in done.stderr
