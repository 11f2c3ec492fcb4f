"""The coordinator as a state machine: any order of arrival, the same words for everybody."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.negotiation.stall_inspector import StallInspector
from ringlet.fusion.requests.request import dumps, loads
from ringlet.ring import ReduceOp

SIZE = 3


def ask(coordinator, rank, *requests):
    return coordinator.on_message(rank, m.REQUEST + dumps([0, [r.to_list() for r in requests]]))


def executed(broadcasts):
    names = []
    for message in broadcasts:
        if message[:1] == m.EXECUTE:
            names += [item[0] for item in loads(message[1:])[2]]
    return names


@given(st.integers(1, 5), st.integers(0, 12), st.randoms())
def test_every_name_runs_once_when_all_ranks_have_asked(size, count, random_):
    coordinator = Coordinator(size)
    pending = [(rank, f"t{i}") for rank in range(size) for i in range(count)]
    random_.shuffle(pending)
    asked: dict[str, set] = {}
    ran = []
    for rank, name in pending:
        asked.setdefault(name, set()).add(rank)
        now = executed(ask(coordinator, rank, Request(name, shape=(4,))))
        assert now == ([name] if len(asked[name]) == size else [])
        ran += now
    assert sorted(ran) == sorted(f"t{i}" for i in range(count))


def test_a_request_seen_before_takes_one_bit():
    coordinator = Coordinator(2)
    requests = [Request(f"t{i}", shape=(4,)) for i in range(1000)]
    ids = {}
    for rank in range(2):
        for message in ask(coordinator, rank, *requests):
            ids.update({item[0]: item[1] for item in loads(message[1:])[2]})
    hits = m.pack_hits(0, 1, sum(1 << i for i in ids.values()))
    assert len(hits) <= 138
    assert coordinator.on_message(0, hits) == []
    (answer,) = coordinator.on_message(1, hits)
    assert len(answer) <= 138
    assert m.ids_of(m.unpack_execute_hits(answer)[2]) == sorted(ids.values())


@given(st.data(), st.integers(2, 4), st.integers(1, 5))
def test_names_and_numbers_of_one_round_meet_in_any_order(data, size, count):
    """Ranks switch the cache off and on at slightly different times."""
    coordinator = Coordinator(size)
    requests = [Request(f"t{i}", shape=(4,)) for i in range(count)]
    numbers = {}
    for rank in range(size):
        for message in ask(coordinator, rank, *requests):
            numbers.update({item[0]: item[1] for item in loads(message[1:])[2]})
    version = 1
    for _ in range(3):
        pending = []
        for rank in range(size):
            by_number = data.draw(st.sets(st.sampled_from(requests)))
            named = [r for r in requests if r not in by_number]
            if by_number:
                bits = sum(1 << numbers[r.name] for r in by_number)
                pending.append((rank, m.pack_hits(0, version, bits)))
            if named:
                asked = [r.to_list() for r in named]
                pending.append((rank, m.REQUEST + dumps([version, asked])))
        joins = size > 2 and data.draw(st.booleans())  # the last rank has no more data
        if joins:
            pending = [(rank, message) for rank, message in pending if rank != size - 1]
            pending.append((size - 1, m.JOIN + dumps(0)))
        ran = []
        for rank, message in data.draw(st.permutations(pending)):
            for answer in coordinator.on_message(rank, message):
                if answer[:1] == m.EXECUTE_HITS:
                    ids = m.ids_of(m.unpack_execute_hits(answer)[2])
                    ran += [name for name, number in numbers.items() if number in ids]
                else:
                    assert answer[:1] == m.EXECUTE
                    version += 1
                    ran += executed([answer])
        assert sorted(ran) == sorted(numbers)
        assert coordinator._waiting() == []
        for rank in range(size - 1 if joins else 0):  # the others follow
            coordinator.on_message(rank, m.JOIN + dumps(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": (5,)}, "shapes differ between ranks (ranks 0, 2: [4]; rank 1: [5])"),
        ({"dtype": "float64"}, "dtypes differ between ranks"),
        (
            {"op": ReduceOp.SUM},
            "reduce ops differ between ranks (ranks 0, 2: Average; rank 1: Sum)",
        ),
        ({"spec": "int8"}, "compressors differ between ranks (ranks 0, 2: none; rank 1: int8)"),
        ({"kind": "allgather"}, "operations differ between ranks"),
        ({"prescale": 2.0}, "prescale factors differ between ranks"),
    ],
)
def test_a_disagreement_names_tensor_and_ranks(change, says):
    from dataclasses import replace

    request = Request("layer.weight", shape=(4,))
    order = [0, 1, 2]
    random.Random(1).shuffle(order)
    coordinator = Coordinator(SIZE)
    answers = []
    for rank in order:
        answers += ask(coordinator, rank, replace(request, **change) if rank == 1 else request)
    (answer,) = answers
    assert answer[:1] == m.REFUSED
    process_set, names, ranks, text, gone = loads(answer[1:])
    assert process_set == 0
    assert gone == []
    assert names == ["layer.weight"]
    assert ranks == [0, 1, 2]
    assert "'layer.weight'" in text
    assert says in text
    # The name is free again afterwards.
    assert executed([a for rank in order for a in ask(coordinator, rank, request)])


def test_groups_must_hold_the_same_tensors():
    coordinator = Coordinator(2)
    a, b = Request("a", shape=(2,)), Request("b", shape=(2,))
    first = m.DECLARE + dumps([0, "model", [a.to_list(), b.to_list()], ""])
    second = m.DECLARE + dumps([0, "model", [a.to_list()], ""])
    assert coordinator.on_message(0, first) == []
    (answer,) = coordinator.on_message(1, second)
    assert loads(answer[1:]) == [
        0,
        "model",
        [0, 1],
        "tensor 'b' is declared on rank 0 but not on rank 1",
        [],
    ]


def grouped(group, *names):
    alike = {"shape": (2,), "group": group, "group_size": len(names)}
    return [Request(name, **alike) for name in names]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            [["g_1of1"], ["g_1of2", "g_2of2"], ["g_1of1"]],
            "allreduce: group 'g' has 1 tensor on ranks 0, 2 and 2 on rank 1",
        ),
        (
            [["a", "b", "c"], ["a", "b"], ["a"]],
            "allreduce: group 'g' has 3 tensors on rank 0 and 2 on rank 1 and 1 on rank 2",
        ),
        (
            [["a", "b"], ["a", "b"], ["a", "c"]],
            "it is a member of group 'g' on rank",  # which one depends on who asked first
        ),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_ranks_that_ask_for_other_members_of_a_group_are_told_the_same(asked, says, order):
    coordinator, told = Coordinator(SIZE), {}
    for rank in order:
        for answer in ask(coordinator, rank, *grouped("g", *asked[rank])):
            assert answer[:1] == m.REFUSED
            _, names, ranks, said, _ = loads(answer[1:])
            for each in ranks:
                told.setdefault(each, []).extend((name, said) for name in names)
        assert bool(told) == (rank == order[-1])
    assert {rank: sorted(name for name, _ in each) for rank, each in told.items()} == {
        rank: sorted(names) for rank, names in enumerate(asked)
    }
    (text,) = {said for each in told.values() for _, said in each}
    assert says in text
    again = [ask(coordinator, rank, *grouped("g", "a", "b")) for rank in order][-1]
    assert executed(again) == ["a", "b"]


def test_the_order_of_rank_0_is_the_groups_order():
    coordinator = Coordinator(2)
    a, b = Request("a", shape=(2,)), Request("b", shape=(2,))
    coordinator.on_message(1, m.DECLARE + dumps([0, "model", [b.to_list(), a.to_list()], ""]))
    (answer,) = coordinator.on_message(
        0, m.DECLARE + dumps([0, "model", [a.to_list(), b.to_list()], ""])
    )
    assert loads(answer[1:]) == [0, "model", 1, ["a", "b"]]


def test_votes_of_a_failed_step_do_not_count_for_the_next():
    coordinator = Coordinator(2)
    old = m.pack_vote(m.Vote(7, 0, 0, 10))
    assert coordinator.on_message(0, old) == []
    failure = m.Failure(0, 7, 0, 0, "compression", "boom")
    (told,) = coordinator.on_message(1, m.FAILED + dumps(failure))
    assert loads(told[1:]) == [7, 0, 0, "compression", "rank 1: boom", 0, []]
    assert coordinator.on_message(1, m.FAILED + dumps(failure)) == []
    assert coordinator.on_message(1, old) == []
    new = [m.pack_vote(m.Vote(7, 1, 0, 10 + rank, turn=1)) for rank in range(2)]
    assert coordinator.on_message(0, new[0]) == []
    (verdict,) = coordinator.on_message(1, new[1])
    assert m.unpack_go(verdict) == m.Verdict(7, 1, 0, 2, (10, 11))


def test_a_rank_that_shuts_down_fails_whoever_waits_for_it():
    coordinator = Coordinator(2)
    ask(coordinator, 0, Request("x", shape=(1,)))
    told, echo = coordinator.on_message(1, m.GOODBYE + dumps(""))
    assert m.unpack_gone(echo) == (1, "rank 1 has shut down")
    assert loads(told[1:]) == [
        0,
        ["x"],
        [0],
        "rank 1 has shut down while 'x' was waiting on rank 0",
        [1],
    ]
    (later,) = ask(coordinator, 0, Request("y", shape=(1,)))
    assert "rank 1 has shut down" in loads(later[1:])[3]


def test_what_ended_a_rank_is_told_to_those_who_wait_for_its_votes():
    for why, words in (("", "has shut down"), ("ValueError: no data", "has ended (ValueError: ")):
        coordinator = Coordinator(3)
        declared = m.DECLARE + dumps([0, "g", [Request("w", shape=(4,)).to_list()], ""])
        (answer,) = [coordinator.on_message(rank, declared) for rank in range(3)][-1]
        vote = m.pack_vote(m.Vote(loads(answer[1:])[2], 0, 0, 10))
        assert coordinator.on_message(0, vote) == []
        told = coordinator.on_message(1, m.GOODBYE + dumps(why))
        (failed,) = [loads(each[1:]) for each in told if each[:1] == m.STEP_FAILED]
        assert failed[4].startswith(f"rank 1 {words}")
        assert "while a step of 'g' was waiting on rank 0" in failed[4]
        assert ("batches" in failed[4]) == (not why)  # a guess, where nobody knows the cause


@given(st.sets(st.integers(0, 5000)))
def test_hits_round_trip(ids):
    process_set, version, bits = m.unpack_hits(m.pack_hits(3, 1 << 40, sum(1 << i for i in ids)))
    assert (process_set, version, m.ids_of(bits)) == (3, 1 << 40, sorted(ids))


def test_a_declaration_is_refused_for_joined_ranks_once_nobody_else_is_awaited():
    now = [0.0]
    coordinator = Coordinator(SIZE, stalls=StallInspector(10.0, clock=lambda: now[0]))
    declared = m.DECLARE + dumps([0, "g", [Request("w", shape=(4,)).to_list()], ""])
    coordinator.on_message(2, m.JOIN + dumps(0))
    assert coordinator.on_message(0, declared) == []
    stalls = []
    for now[0] in (0.0, 10.0):
        stalls += coordinator.on_message(0, m.CHECK)
    (stalled,) = stalls
    assert "the declaration of 'g': 10 s, ready on rank 0, waiting for rank 1" in loads(stalled[1:])
    assert "rank 2" not in loads(stalled[1:])
    (answer,) = coordinator.on_message(1, declared)
    assert answer[:1] == m.REFUSED
    _, name, ranks, text, _ = loads(answer[1:])
    assert (name, ranks) == ("g", [0, 1])
    assert "'g' was not declared: rank 2 joined" in text


@pytest.mark.parametrize("title", [None, "SGD"])
@pytest.mark.parametrize("how", ["released", "removed"])
def test_nothing_is_kept_of_a_group_that_is_forgotten(title, how):
    """As of a sweep's optimizers, each of which was counted for ever under a name of its own."""
    coordinator = Coordinator(1)
    votes = coordinator._votes
    (answer,) = coordinator.on_message(0, m.ADD_SET + dumps([0]))
    number = m.SetChange(*loads(answer[1:])).number
    declared = m.DECLARE + dumps([number, "g", [Request("w", shape=(4,)).to_list()], ""])
    (answer,) = coordinator.on_message(0, declared)
    group = loads(answer[1:])[2]
    if title:
        coordinator.entitle(group, title)
    coordinator.on_message(0, m.pack_vote(m.Vote(group, 0, 0, 10, process_set=number)))
    if how == "released":
        coordinator.on_message(0, m.RELEASE + dumps([number, group]))
    else:
        coordinator.on_message(0, m.REMOVE_SET + dumps(number))
    coordinator.entitle(group, "too late")
    kept = [votes._of, votes._names, votes._titles, votes._turns, votes._released, votes._calls]
    assert not any(kept)


def test_jobs_go_on_beyond_as_many_batches_as_32_bits_count(monkeypatch):
    starts = iter([1 << 32, 1])  # of numbers, and of versions
    shim = SimpleNamespace(count=lambda first: itertools.count(next(starts)))
    monkeypatch.setattr("ringlet.fusion.negotiation.coordinator.itertools", shim)

    def body(engine):
        found, x = [], np.full(3000, engine.rank + 1, np.float32)
        for spec in ("none", "int8") * 3:  # the last ones are asked for by a bit each
            request = Request(f"x.{spec}", shape=(3000,), spec=spec)
            found.append(engine.submit(request, x.copy(), None, parse(spec)).wait())
        request = Request("w", shape=(3000,), spec="int8")
        group = engine.declare("g", [request], [parse("int8")], [{}])
        for _ in range(2):
            found.append(x.copy())
            group.submit("w", found[-1])
            group.wait(60)
        return [group.number, *found]

    for number, *found in with_engines(2, body):
        assert number >= 1 << 32
        assert all(np.allclose(each, 1.5, rtol=1e-2) for each in found)
