"""Copies of what compression holds back, at a neighbour: what ranks owe outlives them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from elastic_jobs import begun, check_kept, committed, epochs, job, owed
from hypothesis import given

from ringlet.compressors import parse
from ringlet.compressors.states import owed as owed_by
from ringlet.compressors.states import resize, take_over
from ringlet.job import elastic
from ringlet.job.process_sets import InvalidArgument, ProcessSet
from ringlet.job.residual_copies import Copy, packed, shift, takers, unpacked
from ringlet.ring.collectives.checksum import checksum
from ringlet.ring.rendezvous import epochs as epochs_of_job

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")

SPEC = "topk(ratio=0.05) | ef"
SUMS = "int4 | ef"  # is compressed again, where shards have been summed
TWO_HOSTS = ["-H", "localhost:2,127.0.0.1:2"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Return the outcomes of all jobs, two at a time: they spend time on waiting."""
    listed = tmp_path_factory.mktemp("redundancy") / "hosts"
    listed.write_text("localhost:3\n")
    shared = {"redundancy": 1, "spec": SPEC, "batches": 40}
    kill = {"do": {"1": [25, "SIGKILL"]}}
    four = ["-np", "4", "--min-np", "2"]
    plans = {
        "4 3 4": (
            ["-np", "4", "--min-np", "3", *TWO_HOSTS, "--blacklist-cooldown-range", "1", "1"],
            kill | {"until": 4, "groups": 2, "spec": SUMS},
        ),
        "two levels": (
            ["-np", "4", "--min-np", "3", *TWO_HOSTS, "--blacklist-cooldown-range", "1", "1"],
            kill | {"until": 4, "spec": SUMS, "levels": 2},
        ),
        "2 1 2": (
            [
                "-np",
                "2",
                "--min-np",
                "1",
                "-H",
                "localhost:1,127.0.0.1:1",
                "--blacklist-cooldown-range",
                "1",
                "1",
            ],
            kill | {"until": 2},
        ),
        "step": (four, kill | {"resume": "step"}),
        "together": (four, {"do": {"1": [25, "SIGKILL"], "2": [25, "SIGKILL"]}}),
        "sent away together": (
            ["-np", "3", "--min-np", "1", "--host-discovery-script", f"cat {listed}"],
            {"hosts": {"3": "localhost:1\n"}, "file": str(listed), "until": 1},
        ),
        "during the copy": (four, {"die": {"1": ["send", 1, 30]}}),
        "before new copies": (four, kill | {"spec": SUMS, "die": {"3": ["renew", 2, 20]}}),
        "who takes over": (four, kill | {"die": {"2": ["_take_over", 2, 20]}}),
    }
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(job, flags, shared | plan) for name, (flags, plan) in plans.items()
        }
        yield lambda name: started[name].result(400)


def check_end(done, lines, size):
    assert done.returncode == 0, done.stderr
    assert [line["equal"] for line in lines if "done" in line] == [True] * size


def test_what_ranks_owe_outlives_a_rank_and_is_shared_with_a_newcomer(jobs, record_property):
    done, lines = jobs("4 3 4")
    check_end(done, lines, 4)
    (first, second, third) = epochs(lines)
    assert (first, second, third[0]) == ((4, 0), (3, 20), 4)
    off = check_kept(lines, 3, 20), check_kept(lines, 4, third[1])
    told = f"4 -> 3 -> 4 ranks with a copy: what is owed is kept to {max(off):.0e}"
    record_property("measured", told)
    said = "what compression held back on rank 1 of before goes on with rank 2 of now: gradients"
    assert said in done.stderr  # of the other host
    assert "is lost" not in done.stderr


def test_what_ranks_owe_outlives_two_levels(jobs):
    done, lines = jobs("two levels")
    check_end(done, lines, 4)
    (first, second, third) = epochs(lines)
    assert (first, second, third[0]) == ((4, 0), (3, 20), 4)
    check_kept(lines, 3, 20)
    check_kept(lines, 4, third[1])
    shards = {line["shards"] for line in committed(lines, 20)}
    assert shards == {True}


def test_what_two_ranks_owe_outlives_one_and_is_given_back_by_the_other(jobs):
    done, lines = jobs("2 1 2")
    check_end(done, lines, 2)
    (first, second, third) = epochs(lines)
    assert (first, second, third[0]) == ((2, 0), (1, 20), 2)
    check_kept(lines, 1, 20)
    # From one rank nothing travels: its first step took what was owed.
    assert [line["residual"] for line in begun(lines) if line["size"] == 2][2:] == [0.0, 0.0]


def test_a_copy_is_said_to_be_older_than_the_step_at_hand(jobs):
    done, lines = jobs("step")
    check_end(done, lines, 3)
    assert epochs(lines) == [(4, 0), (3, 25)]
    assert "held back on rank 1 of before goes on with rank 1 of now: gradients" in done.stderr
    assert "steps old\n" in done.stderr
    # Survivors' own is that of the step at hand.
    now, _ = owed([x for x in begun(lines) if x["batch"] == 25 and x["started"] in (0, 3)])
    assert np.abs(now).max() > 0


def test_a_rank_and_its_copy_are_lost_together(jobs):
    done, lines = jobs("together")
    check_end(done, lines, 2)
    assert epochs(lines) == [(4, 0), (2, 20)]
    check_kept(lines, 2, 20, of=(0, 2, 3))
    assert "what compression held back on rank 1 is lost: gradients" in done.stderr
    assert "held back on rank 2 of before goes on with rank 1 of now" in done.stderr


def test_a_rank_and_its_copy_are_sent_away_together(jobs):
    done, lines = jobs("sent away together")
    check_end(done, lines, 1)
    assert [size for size, _ in epochs(lines)] == [3, 1]
    assert "what compression held back on rank 1 is lost: gradients" in done.stderr
    assert "held back on rank 2 of before goes on with rank 0 of now" in done.stderr
    assert done.stderr.count("held back") == 2


def test_a_rank_is_killed_while_copies_travel(jobs):
    done, lines = jobs("during the copy")
    check_end(done, lines, 3)
    assert epochs(lines)[1:] == [(3, 30)]
    assert "held back on rank 1 of before goes on with rank 1 of now: gradients" in done.stderr
    assert "10 steps old\n" in done.stderr
    then, scale = owed(committed(lines, 20, (1,)) + committed(lines, 30, (0, 2, 3)))
    now, _ = owed([line for line in begun(lines) if line["size"] == 3])
    np.testing.assert_allclose(now, then, atol=1e-6 * scale)


def test_another_rank_is_lost_before_there_are_new_copies(jobs):
    done, lines = jobs("before new copies")
    check_end(done, lines, 2)
    assert epochs(lines) == [(4, 0), (2, 20)]
    check_kept(lines, 2, 20)
    for rank in (1, 2):  # the latter was rank 3 at first
        assert f"held back on rank {rank + (rank == 2)} of before goes on with" in done.stderr
    assert "is lost" not in done.stderr


def test_who_takes_over_is_lost_as_well(jobs):
    done, lines = jobs("who takes over")
    check_end(done, lines, 2)
    assert epochs(lines) == [(4, 0), (2, 20)]
    check_kept(lines, 2, 20, of=(0, 2, 3))
    assert "what compression held back on rank 1 is lost: gradients" in done.stderr
    assert "held back on rank 2 of before goes on with" in done.stderr


def test_a_state_without_compressors_says_so():
    state = elastic.ObjectState(batch=0)
    with pytest.raises(TypeError, match="ObjectState knows no compressors, whose memory could"):
        elastic.run(redundancy=1)(lambda state: None)(state)
    with pytest.raises(ValueError, match="redundancy must be 0 or 1 copies, not 2"):
        elastic.run(redundancy=2)


def test_an_optimizer_of_some_ranks_is_refused():
    class Some(elastic.ObjectState):
        def holders(self):
            return [SimpleNamespace(process_set=ProcessSet([0, 1]))]

    with pytest.raises(InvalidArgument, match=r"reduces over ProcessSet\(.*ranks=\[0, 1\]"):
        elastic.run(redundancy=1)(lambda state: None)(Some())


@pytest.mark.parametrize("norm", [None, 2.0])
def test_copies_are_sent_at_each_commit_whatever_a_rank_knows_of_the_norm(norm, monkeypatch):
    """A state of one's own need not know it, and all ranks take part."""

    class Own(elastic.ObjectState):
        def held_back(self):
            return norm

    done = []
    monkeypatch.setattr(epochs_of_job, "is_elastic", lambda: True)
    monkeypatch.setattr(epochs_of_job, "tell_held", lambda *told: done.append(told))
    state = Own()
    state._hosts_have_changed = lambda: False
    state._copies = SimpleNamespace(send=lambda: done.append("sent"))
    state.commit()
    assert done == ["sent"] + [(norm, True)] * (norm is not None)


# -- rules ------------------------------------------------------------------------------------

SPECS = ["topk(ratio=0.1) | ef", "fp16 | ef", "shared_int | ef", "topk | ef(dtype='bf16')"]
N = 40
SHARDS = {0: 16, 16: 16, 32: 8}  # where they begin, and their sizes


def residuals(size, spec, seed):
    """Return states as if ranks had held back what is normal."""
    draw, compressor = np.random.default_rng(seed), parse(spec)
    unit = 1 / size if compressor.traits().predivide else 1
    normal = lambda n: draw.standard_normal(n).astype(np.float32) * unit  # noqa: E731
    states = [{"residual": normal(N)} for _ in range(size)]
    for state, (start, shard) in zip(states, SHARDS.items(), strict=False):
        state[f"stage2.{start}"] = {"residual": normal(shard)}
    return states


def mean(states, spec):
    """Return what is owed to the mean: of sums, what was held back is that of a mean already."""
    whole = summed(states) if parse(spec).traits().predivide else summed(states) / len(states)
    return whole + summed_sums(states)


def summed(states):
    return sum(np.asarray(s.get("residual", np.zeros(N)), np.float64) for s in states)


def summed_sums(states):
    whole = np.zeros(N)
    for state in states:
        for start, shard in SHARDS.items():
            if (key := f"stage2.{start}") in state:
                whole[start : start + shard] += state[key]["residual"]
    return whole


@given(
    st.integers(2, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=6),
    st.sampled_from(SPECS), st.integers(0, 99),
)  # fmt: skip
def test_what_is_owed_stays_what_it_is_whoever_comes_or_goes(size, events, spec, seed):
    compressor, states = parse(spec), residuals(size, spec, seed)
    first = mean(states, spec)
    for comes, number in events:
        before = len(states)
        copies = [owed_by(state, compressor, before, average=True) for state in states]
        lost = None if comes or before == 1 else number % before
        after = before + (1 if lost is None else -1)
        left = [state for i, state in enumerate(states) if i != lost]
        for state in left:
            resize(state, compressor, before, after, average=True, owed=True)
        if lost is None:
            left.append({})
        else:
            where = before, after, True
            take_over(left[number % len(left)], compressor, copies[lost], *where)
        states = left
    np.testing.assert_allclose(mean(states, spec), first, atol=1e-6 * (1 + np.abs(first).max()))


@given(st.integers(2, 5), st.sampled_from(SPECS), st.integers(0, 99))
def test_what_is_owed_to_a_sum_is_added_as_it_is(size, spec, seed):
    compressor, states = parse(spec), residuals(size, spec, seed)
    whole = summed(states) + summed_sums(states)
    gone = owed_by(states.pop(), compressor, size, average=False)
    for state in states:
        resize(state, compressor, size, size - 1, average=False, owed=True)
    take_over(states[0], compressor, gone, size, size - 1, average=False)
    kept = sum(state["residual"].astype(np.float64) for state in states)
    np.testing.assert_allclose(kept, whole, atol=1e-5)


@pytest.mark.parametrize("owed", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_held_back_of_sums_stays_what_it_is_among_more_or_fewer(spec, owed):
    compressor = parse(spec)
    for before, after in ((3, 2), (2, 3), (3, 3)):
        states = residuals(before, spec, 0)
        for state in states:
            state["residual"][:] = 0
        first = mean(states, spec)
        for state in states:
            resize(state, compressor, before, after, average=True, owed=owed)
            assert state.keys() == {"residual"}
        whole = sum(state["residual"].astype(np.float64) for state in states)
        found = whole if compressor.traits().predivide else whole / after
        np.testing.assert_allclose(found, first, atol=1e-6)


def test_a_copy_of_a_tensor_of_another_shape_is_left_alone():
    state = {"residual": np.ones(3, np.float32)}
    given = {"residual": np.ones(4, np.float32)}
    take_over(state, parse(SPEC), given, 2, 2, average=True)
    np.testing.assert_array_equal(state["residual"], np.ones(3))


NAMES = st.text(max_size=5)
HELD = st.lists(
    st.dictionaries(
        NAMES, st.dictionaries(NAMES, st.integers(0, 9).map(lambda n: np.arange(n) / 3), max_size=2)
    ),
    max_size=2,
)


@given(HELD, st.lists(st.integers(0, 1 << 40), min_size=5, max_size=5))
def test_a_copy_arrives_as_it_was_sent(held, numbers):
    numbers[3] += numbers[2] + 1  # there are more ranks than the number of this one
    found = unpacked(packed(Copy(*numbers, held)))
    assert (found.member, found.epoch, found.rank, found.size, found.step) == tuple(numbers)
    for sent, came in zip(held, found.held, strict=True):
        sent = {name: of for name, of in sent.items() if of}
        assert came.keys() == sent.keys()
        for name, of in sent.items():
            for key, array in of.items():
                np.testing.assert_array_equal(came[name][key], array.astype(np.float32))


@given(st.data())
def test_what_is_no_copy_is_refused(data):
    good = packed(Copy(1, 1, 0, 2, 5, [{"w": {"residual": np.ones(9)}}]))
    bad = good.copy()
    bad[data.draw(st.integers(0, good.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert unpacked(bad) is None
    assert unpacked(good[: data.draw(st.integers(0, good.size - 1))]) is None
    unpacked(np.frombuffer(data.draw(st.binary(max_size=60)), np.uint8))  # raises nothing


@pytest.mark.parametrize(
    ("numbers", "arrays"),
    [
        ([1, 1, 0, 4, 5, 100_000_000], []),  # holders, for which there would be no memory
        ([1, 1, 0, 0, 5, 1], []),  # of no ranks
        ([1, 1, 4, 4, 5, 1], []),
        ([1, 1, 0, -4, 5, 1], []),
        ([1, 1, 0, 4, 5, 1], [[0, "w", "residual", [-1]]]),
        ([1, 1, 0, 4, 5, 1], [[0, "w", "residual", [8]]]),  # there are nine
        ([1, 1, 0, 4, 5, 1], [[-1, "w", "residual", [9]]]),
        ([1, 1, 0, 4, 5, 1], [[0, "w", "residual", [1.0, 9]]]),
    ],
)
def test_a_head_that_makes_no_sense_is_refused(numbers, arrays):
    text = json.dumps({"copy": numbers, "arrays": arrays}).encode()
    text += b" " * (-len(text) % 8)
    rest = np.frombuffer(text + bytes(4 * 9), np.uint8)
    words = np.array([len(text), checksum(rest)], np.uint64)
    assert unpacked(np.concatenate([words.view(np.uint8), rest])) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_rank_gets_one_copy_from_another_host_where_hosts_are_alike(counts):
    hosts = [f"host{i}" for i, count in enumerate(counts) for _ in range(count)]
    step = shift(hosts)
    assert 1 <= step <= max(1, len(hosts) - 1)
    if len(set(counts)) == 1 and len(counts) > 1:
        for rank in range(len(hosts)):
            assert hosts[rank] != hosts[(rank + step) % len(hosts)]


def told(member, copies=(), taken=()):
    return {"member": member, "host": "", "copies": copies, "taken": taken}


def test_the_newest_copy_of_who_is_gone_counts_and_once():
    told_by = [
        told(0, [[7, 1, 20]]),
        told(4, [[7, 2, 10], [0, 2, 10]]),  # of a later epoch, which began at an earlier step
        told(5, [[7, 2, 10], [8, 1, 20]]),
    ]
    assert takers(told_by) == {7: 1, 8: 2}
    assert takers([*told_by, told(6, taken=[[7, 0, 1.0, 0]])]) == {8: 2}
