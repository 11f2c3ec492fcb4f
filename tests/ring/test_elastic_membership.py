"""The rules of elastic jobs: single cases, and whatever may happen in any order."""

from __future__ import annotations

import signal

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringlet.ring.elastic.driver import how_ended
from ringlet.ring.elastic.membership import FENCE, LATECOMERS, LEAVE, Membership
from ringlet.ring.elastic.rules import Rules
from ringlet.ring.errors import LOST_PEER
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.launch.rank_table import Rank
from ringlet.ring.rendezvous.epochs import Question, met_epoch
from ringlet.ring.rendezvous.loss_report import leaving_code

TWO = [Host("a", 2), Host("b", 2)]


def running(hosts=TWO, **rules):
    """Return the members of a job whose first epoch has begun, and its rules."""
    slots = sum(host.slots for host in hosts)
    members = Membership(Rules(**{"np": slots, "min_np": 1} | rules), 0.0, lambda: 0.5)
    members.hosts_found(hosts, 0.0)
    for member in members.decide(0.0).start:
        members.asks(member.number, (), 0.0)
    for number in members.decide(0.0).seats:
        members.meets(number, 1)
    return members


def ranks(decisions):
    return {number: seat.rank for number, seat in decisions.seats.items()}


def test_the_first_epoch_waits_for_np_and_fills_hosts_in_order():
    members = Membership(Rules(3, 1), 0.0)
    members.hosts_found([Host("a", 2), Host("b", 1)], 0.0)
    started = members.decide(0.0).start
    assert [(m.host, m.local) for m in started] == [("a", 0), ("a", 1), ("b", 0)]
    for member in started[:2]:
        members.asks(member.number, (), 0.0)
    assert not members.decide(1.0).seats
    members.asks(2, (), 1.0)
    seats = members.decide(1.0).seats
    assert [(s.epoch, s.rank, s.size, s.local_rank, s.local_size) for s in seats.values()] == [
        (1, 0, 3, 0, 2),
        (1, 1, 3, 1, 2),
        (1, 2, 3, 0, 1),
    ]


def test_a_failed_rank_takes_its_host_along_where_enough_are_left():
    members = running()
    members.ended(0, 137, "was killed", 1.0)
    for number in (1, 2, 3):
        members.asks(number, (0,), 1.0)
    todo = members.decide(1.0)
    assert ranks(todo) == {2: 0, 3: 1}
    assert todo.dismiss == {1: ""}
    assert todo.lost == [1]
    assert not todo.start
    assert "rank 0 on a was killed; no rank is started there any more, its other" in todo.notes[0]


def test_what_has_ended_well_is_known_by_rank():
    members = running()
    members.hosts_found([Host("b", 2)], 1.0)  # host a leaves after the last commit
    for number in (3, 1, 0, 2):
        members.ended(number, 0, "exited with code 0", 2.0)
    assert members.decide(2.0).over == (0, "")
    assert members.returned() == [0, 1, 2, 3]
    # Before there was any epoch, by number.
    members = Membership(Rules(2, 1), 0.0)
    members.hosts_found(TWO[:1], 0.0)
    members.decide(0.0)
    for number in (1, 0):
        members.ended(number, 0, "exited with code 0", 1.0)
    assert members.decide(1.0).over == (0, "")
    assert members.returned() == [0, 1]


def test_who_is_sent_away_has_returned_nothing():
    members = running()
    members.hosts_found([Host("a", 2)], 1.0)
    for number in range(4):
        members.asks(number, (), 1.0)
    assert set(members.decide(1.0).dismiss) == {2, 3}
    for number in (2, 3):
        members.ended(number, 0, "exited with code 0", 2.0)
    assert members.decide(2.0).over is None
    for number in (0, 1):
        members.ended(number, 0, "exited with code 0", 3.0)
    assert members.returned() == [0, 1]


def test_a_job_that_has_finished_waits_for_nobody_who_is_still_to_come():
    members = running(TWO[:1])
    members.hosts_found(TWO, 1.0)
    assert len(members.decide(1.0).start) == 2
    for number in (0, 1):
        members.ended(number, 0, "exited with code 0", 2.0)
    assert members.decide(2.0).over == (0, "")


def test_who_is_left_when_others_have_finished_is_late():
    """A frozen wrapper was waited for without end, as no rank was left to miss it."""
    members = running(TWO[:1])
    assert members.late() == []
    members.ended(0, 0, "exited with code 0", 1.0)
    assert members.late() == [1]
    members.silent(1, 6.0)
    assert members.late() == []
    assert [m.number for m in members.decide(6.0 + FENCE).kill] == [1]


def test_a_cause_takes_the_place_of_an_effect():
    members = running(min_np=4)
    members.ended(0, LOST_PEER, "lost another rank", 1.0)
    members.ended(3, 9, "exited with code 9", 1.0)
    assert members.first_failed == 3
    members.ended(2, 7, "exited with code 7", 1.0)
    assert members.first_failed == 3


def test_survivors_of_the_only_host_stay():
    members = running([Host("a", 3)])
    members.ended(1, 1, "exited with code 1", 1.0)
    members.asks(0, (), 1.0)
    assert not members.decide(1.0).seats  # rank 2 has not asked yet
    members.asks(2, (), 1.0)
    assert ranks(members.decide(1.0)) == {0: 0, 2: 1}


def test_a_host_that_failed_comes_back_after_its_cool_down_which_doubles():
    members = running([Host("a", 1), Host("b", 1)], cooldown=(10.0, 100.0))
    members.ended(1, 1, "failed", 0.0)
    members.asks(0, (1,), 0.0)
    assert ranks(members.decide(0.0)) == {0: 0}
    assert not members.decide(14.9).start  # 10 s, and half of that drawn
    (again,) = members.decide(15.0).start
    assert (again.host, again.number) == ("b", 2)
    members.ended(2, 1, "failed", 20.0)
    assert not members.decide(44.9).start  # 20 s, and 5
    assert members.decide(45.0).start


def test_newcomers_are_announced_once_and_wait_until_all_have_come():
    members = running([Host("a", 2)])
    members.hosts_found([Host("a", 2), Host("b", 1)], 1.0)
    (newcomer,) = members.decide(1.0).start
    assert not members.decide(2.0).changed
    members.asks(newcomer.number, (), 3.0)
    assert members.decide(3.0).changed
    assert not members.decide(3.0).changed
    members.asks(0, (), 4.0)
    assert not members.decide(4.0).seats
    members.asks(1, (), 4.0)
    assert ranks(members.decide(4.0)) == {0: 0, 1: 1, 2: 2}


def test_newcomers_that_start_together_come_in_one_change_of_ranks():
    members = running(TWO[:1])
    members.hosts_found(TWO, 1.0)
    assert [m.number for m in members.decide(1.0).start] == [2, 3]
    members.asks(2, (), 3.0)
    assert not members.decide(3.0).changed
    members.asks(3, (), 5.0)
    assert members.decide(5.0).changed
    for number in (0, 1):
        members.asks(number, (), 6.0)
    assert ranks(members.decide(6.0)) == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("fails", [False, True])
def test_a_newcomer_waits_neither_for_ever_nor_for_one_that_failed(fails):
    members = running(TWO[:1])
    members.hosts_found([*TWO, Host("c", 1)], 1.0)
    assert [m.number for m in members.decide(1.0).start] == [2, 3, 4]
    for number in (2, 3):
        members.asks(number, (), number + 1.0)
        assert not members.decide(number + 1.0).changed
    if fails:
        members.ended(4, 1, "did not start", 5.0)
        assert members.decide(5.0).changed
        return
    assert members.patience(4.0) == LATECOMERS - 1.0
    assert not members.decide(2.9 + LATECOMERS).changed
    assert members.decide(3.0 + LATECOMERS).changed
    assert members.patience(4.0 + LATECOMERS) is None
    members.asks(4, (), 60.0)
    assert members.decide(60.0).changed


def test_ranks_of_a_host_that_goes_are_told_and_dismissed():
    members = running()
    members.hosts_found([Host("b", 2)], 1.0)
    assert members.decide(1.0).changed
    for number in range(4):
        members.asks(number, (), 2.0)
    todo = members.decide(2.0)
    assert (ranks(todo), todo.dismiss) == ({2: 0, 3: 1}, {0: "", 1: ""})
    members.ended(0, 0, "exited with code 0", 3.0)
    members.ended(1, 0, "exited with code 0", 3.0)
    assert members.decide(3.0).over is None


def test_who_was_lost_and_does_not_come_is_killed():
    members = running([Host("a", 3)])
    members.asks(1, (0,), 1.0)
    members.asks(2, (0,), 1.0)
    assert members.patience(1.0) == FENCE
    assert members.called() == [0]
    assert not members.decide(1.0).kill
    assert [m.number for m in members.decide(1.0 + FENCE).kill] == [0]
    members.ended(0, 137, "was killed", 4.0)
    assert members.called() == []
    assert ranks(members.decide(4.0)) == {1: 0, 2: 1}


def test_whom_the_launcher_kills_is_not_said_to_have_been_killed_by_a_stranger():
    killed = Rank(0, code=-signal.SIGKILL)
    said, code = how_ended(killed, killed=True)
    assert (said.startswith("was lost by the others"), code) == (True, 137)
    assert how_ended(killed, killed=False) == ("was ended by signal 9 (SIGKILL)", 137)
    assert how_ended(Rank(0, code=3), killed=True) == ("exited with code 3", 3)
    assert "host cannot be reached" in how_ended(Rank(0, code=-9, lost=True), killed=True)[0]


def test_whom_the_launcher_kills_that_had_said_how_it_ends_has_that_code():
    killed = Rank(0, code=-signal.SIGKILL)
    said = "was to end with code 3, did not within 5 s, and was killed"
    assert how_ended(killed, killed=True, leaving=3) == (said, 3)
    assert how_ended(Rank(0, code=4), killed=True, leaving=3) == ("exited with code 4", 4)


@pytest.mark.parametrize("told", [0.5, 2.0], ids=["before", "after"])
def test_who_says_that_it_ends_gets_time_for_that(told):
    members = running([Host("a", 3)])
    if told < 1.0:
        members.leaves(0, 1, told)
    members.asks(1, (0,), 1.0)
    members.asks(2, (0,), 1.0)
    if told > 1.0:
        members.leaves(0, 1, told)
        members.leaves(0, 1, told + 1)
    limit = max(told, 1.0) + LEAVE
    assert not members.decide(limit - 0.01).kill
    assert [m.number for m in members.decide(limit).kill] == [0]


def test_who_was_lost_by_others_and_comes_stays():
    members = running([Host("a", 2)])
    members.asks(1, (0,), 1.0)
    members.asks(0, (1,), 2.0)
    todo = members.decide(1.0 + 2 * FENCE)
    assert (ranks(todo), todo.kill) == ({0: 0, 1: 1}, [])


def test_who_is_dropped_and_does_not_leave_is_killed():
    members = running()
    members.ended(0, 1, "failed", 1.0)
    assert not members.decide(1.0).kill
    assert [m.number for m in members.decide(1.0 + LEAVE).kill] == [1]


def test_too_few_end_the_job_at_once_or_when_time_is_up():
    fixed = running([Host("a", 2)], min_np=2, fixed=True)
    fixed.ended(0, 9, "exited with code 9", 1.0)
    fixed.asks(1, (0,), 1.0)
    assert fixed.decide(1.0).over == (9, "rank 0 on a exited with code 9")
    found = running(TWO, min_np=3, timeout=60.0)
    found.ended(0, 9, "failed", 1.0)
    for number in (1, 2, 3):
        found.asks(number, (), 1.0)
    assert ranks(found.decide(1.0)) == {1: 0, 2: 1, 3: 2}  # without rank 1 they would be too few
    found.ended(1, 9, "failed", 2.0)
    for number in (2, 3):
        found.asks(number, (), 2.0)
    assert found.decide(61.9).over is None
    code, why = found.decide(62.0).over
    assert code == 1
    assert "--min-np 3 ranks are needed; 2 are there, on hosts with 2 usable slots" in why


def test_a_rank_that_does_not_come_to_be_numbered_anew_is_named():
    members = running([Host("a", 3)], timeout=60.0)
    members.asks(0, (), 1.0)
    members.asks(2, (), 5.0)
    _, why = members.decide(61.0).over
    assert why.startswith("rank 1 did not come to be numbered anew within 60 s")


def test_the_reset_limit():
    members = running([Host("a", 3)], reset_limit=1)
    for expected in ({1: 0, 2: 1}, {}):
        number = 0 if expected else 1
        members.ended(number, 1, "failed", 1.0)
        for other in range(number + 1, 3):
            members.asks(other, (), 1.0)
        todo = members.decide(1.0)
        assert ranks(todo) == expected
    assert todo.over == (1, "rank 0 on a failed; --reset-limit 1 is reached")


@pytest.mark.parametrize("ends", [True, False])
def test_the_reset_limit_names_who_was_lost_also_where_its_end_is_known_later(ends):
    members = running([Host("a", 3)], reset_limit=1)
    members.ended(0, 1, "failed", 1.0)
    for other in (1, 2):
        members.asks(other, (), 1.0)
    assert ranks(members.decide(1.0)) == {1: 0, 2: 1}
    members.asks(2, (0,), 2.0)
    assert members.decide(2.0).over is None
    if not ends:  # it hangs
        assert members.decide(2.0 + FENCE).kill == [members.members[1]]
    members.ended(1, 137, "was ended by signal 9 (SIGKILL)", 4.0)
    expected = "rank 0 on a was ended by signal 9 (SIGKILL); --reset-limit 1 is reached"
    assert members.decide(4.0).over == (137, expected)


def test_once_a_rank_has_finished_nobody_starts_or_is_numbered_anew():
    members = running([Host("a", 3)], cooldown=(1.0, 1.0))
    members.ended(2, 0, "exited with code 0", 1.0)
    members.asks(0, (2,), 1.0)
    todo = members.decide(1.0)
    assert todo.dismiss == {0: "rank 2 has finished, and with it the job"}
    members.ended(0, 1, "exited with code 1", 2.0)
    assert not members.decide(5.0).start
    members.ended(1, 0, "exited with code 0", 6.0)
    early = "rank 2 on a exited with code 0 while others still needed it"
    assert members.decide(6.0).over == (1, f"{early}, so rank 0 on a exited with code 1")


def test_a_newcomer_that_finds_the_job_finished_has_not_failed():
    members = running([Host("a", 1)])
    members.hosts_found([Host("a", 2)], 1.0)
    (newcomer,) = members.decide(1.0).start
    members.ended(0, 0, "exited with code 0", 2.0)
    members.ended(newcomer.number, 1, "exited with code 1", 2.0)
    todo = members.decide(2.0)
    assert (todo.over, todo.notes) == ((0, ""), [])


def test_a_newcomer_that_asks_when_the_job_has_finished_is_sent_away_without_an_error():
    members = running([Host("a", 2)])
    members.hosts_found([Host("a", 3)], 1.0)
    (newcomer,) = members.decide(1.0).start
    members.ended(0, 0, "exited with code 0", 2.0)
    members.asks(newcomer.number, (), 2.0)
    members.asks(1, (0,), 2.0)
    assert members.decide(2.0).dismiss == {
        newcomer.number: "",
        1: "rank 0 has finished, and with it the job",
    }


def test_a_newcomer_that_fails_bars_its_host_and_disturbs_nobody():
    members = running([Host("a", 2)])
    members.hosts_found([Host("a", 3)], 1.0)
    (newcomer,) = members.decide(1.0).start
    members.ended(newcomer.number, 1, "did not start", 2.0)
    todo = members.decide(3.0)
    assert (todo.start, todo.lost, todo.kill) == ([], [], [])
    assert todo.notes == ["newcomer 2 on a did not start; no rank is started there any more"]


def test_who_was_dismissed_and_ends_later_disturbs_no_epoch():
    members = running()
    members.ended(0, 137, "was killed", 1.0)
    for number in (1, 2, 3):
        members.asks(number, (0,), 1.0)
    assert members.decide(1.0).seats
    members.ended(1, 0, "exited with code 0", 1.2)  # while the others meet
    assert members.decide(1.2).lost == []
    members.ended(2, 1, "failed", 1.3)
    assert members.decide(1.3).lost == [2]


def test_what_a_slow_dropped_member_has_lost_is_nobody_of_the_next_epoch():
    members = running()
    members.ended(0, 137, "was killed", 1.0)
    for number in (2, 3):
        members.asks(number, (0,), 1.0)
    assert ranks(members.decide(1.0)) == {2: 0, 3: 1}
    members.asks(1, (0,), 1.5)  # rank 0 of the epoch before
    todo = members.decide(1.5)
    assert (todo.dismiss, todo.kill) == ({1: ""}, [])
    assert members.decide(1.5 + FENCE).kill == []
    members.ended(1, 0, "exited with code 0", 4.0)
    assert members.decide(4.0).kill == []


def test_a_newcomer_that_failed_does_not_make_a_job_fail():
    members = running([Host("a", 2)])
    members.hosts_found([Host("a", 2), Host("b", 1)], 1.0)
    (newcomer,) = members.decide(1.0).start
    members.ended(newcomer.number, 1, "did not start", 2.0)
    for number in (0, 1):
        members.ended(number, 0, "exited with code 0", 3.0)
    assert members.decide(3.0).over == (0, "")


def test_a_newcomer_that_ends_well_before_it_has_a_rank_is_not_the_end_of_the_job():
    members = running([Host("a", 2)])
    members.hosts_found([Host("a", 2), Host("b", 1)], 1.0)
    (newcomer,) = members.decide(1.0).start
    members.ended(newcomer.number, 0, "exited with code 0", 2.0)
    assert not members.decide(2.0).start  # nor is it started for ever
    members.asks(0, (), 3.0)
    members.asks(1, (), 3.0)
    assert ranks(members.decide(3.0)) == {0: 0, 1: 1}


def test_a_rank_of_a_host_that_went_is_killed_where_it_does_not_leave():
    members = running()
    members.hosts_found([Host("b", 2)], 1.0)
    for number in (1, 2, 3):  # rank 0 is frozen
        members.asks(number, (0,), 2.0)
    assert ranks(members.decide(2.0)) == {2: 0, 3: 1}
    assert [m.number for m in members.decide(2.0 + LEAVE).kill] == [0, 1]


def test_a_limit_that_passes_between_two_looks_is_not_slept_through():
    members = running([Host("a", 2)])
    members.asks(1, (0,), 1.0)
    members.decide(1.0 + FENCE - 0.01)
    assert members.patience(1.0 + FENCE + 0.1) == 0.0


def test_who_ends_after_the_last_decision_is_decided_about_at_once():
    members = Membership(Rules(1, 1, fixed=True), 0.0)
    members.hosts_found([Host("a", 1)], 0.0)
    (member,) = members.decide(0.0).start
    assert members.patience(0.0) != 0.0
    members.ended(member.number, 1, "did not start", 0.0)
    assert members.patience(0.0) == 0.0
    assert members.decide(0.0).over == (1, "newcomer 0 on a did not start")


@pytest.mark.parametrize("most", [2, 3])
def test_there_are_never_more_than_max_np(most):
    members = running([Host("a", 2)], max_np=most)
    members.hosts_found([Host("a", 2), Host("b", 4)], 1.0)
    assert len(members.decide(1.0).start) == most - 2


def test_ranks_stay_where_only_newcomers_are_elsewhere():
    members = running([Host("a", 2)])
    members.hosts_found([Host("a", 2), Host("b", 1)], 1.0)
    (newcomer,) = members.decide(1.0).start
    members.ended(0, 137, "was killed", 2.0)  # before the newcomer has said a word
    members.asks(1, (0,), 2.1)
    todo = members.decide(2.1)
    assert (todo.over, todo.dismiss, ranks(todo)) == (None, {}, {1: 0})
    members.asks(newcomer.number, (), 3.0)
    assert members.decide(3.0).changed


def test_a_host_that_never_stops_failing_is_said_less_and_less_often():
    members = running([Host("a", 1), Host("b", 1)], cooldown=(0.001, 0.5))
    members.ended(1, 1, "failed", 0.0)
    members.asks(0, (1,), 0.0)
    notes, now = members.decide(0.0).notes, 0.0
    for _ in range(1100):  # 2**1024 is no float any more
        now += 1.0
        (newcomer,) = members.decide(now).start
        members.ended(newcomer.number, 1, "did not start", now)
        notes += members.decide(now).notes
    said = [int(note.partition(" (")[2].partition(" ")[0]) for note in notes if "failures" in note]
    assert said == [2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025]


def test_who_is_late_is_known_and_ended_where_it_is_silent():
    members = running([Host("a", 3)])
    assert members.late() == []
    members.asks(0, (), 1.0)
    assert members.late() == [1, 2]
    members.asks(2, (), 1.0)
    members.silent(1, 6.0)
    assert members.late() == []  # until it comes
    assert [m.number for m in members.decide(6.0 + FENCE).kill] == [1]
    members.ended(1, 137, "was killed", 8.0)
    assert ranks(members.decide(8.0)) == {0: 0, 2: 1}


def test_who_has_a_rank_and_has_not_met_the_others_is_late():
    members = running([Host("a", 2)])
    for number in (0, 1):
        members.asks(number, (), 1.0)
    assert members.decide(1.0).seats
    assert members.late() == [0, 1]
    members.meets(0, 2)
    members.meets(1, 1)  # of the epoch before
    assert members.late() == [1]
    members.meets(0, 1)
    assert members.late() == [1]
    members.silent(1, 5.0)
    assert [m.number for m in members.decide(5.0 + FENCE).kill] == [1]


def test_a_lone_rank_is_late_while_newcomers_wait_for_it():
    members = running([Host("a", 1)])
    assert members.late() == []
    members.hosts_found([Host("a", 1), Host("b", 1)], 1.0)
    (newcomer,) = members.decide(1.0).start
    assert members.late() == []
    members.asks(newcomer.number, (), 2.0)
    assert members.late() == [0]


def test_the_first_epoch_does_not_wait_for_ever_for_more_than_it_needs():
    members = Membership(Rules(2, 1), 0.0)
    members.hosts_found([Host("a", 3)], 0.0)
    members.decide(0.0)
    members.asks(0, (), 1.0)
    members.asks(1, (), 2.0)
    assert members.patience(2.0) == LATECOMERS
    assert not members.decide(1.9 + LATECOMERS).seats
    todo = members.decide(2.0 + LATECOMERS)
    assert ranks(todo) == {0: 0, 1: 1}
    assert todo.notes == ["2 ranks begin; process 2 on a did not call init, and may come later"]
    members.asks(2, (), 60.0)
    assert members.decide(60.0).changed


def test_a_short_time_limit_begins_with_those_who_are_there():
    members = Membership(Rules(2, 1, timeout=12.0), 0.0)
    members.hosts_found([Host("a", 3)], 0.0)
    members.decide(0.0)
    for number in (0, 1):
        members.asks(number, (), 11.0)
    assert members.decide(12.0).over is None
    assert ranks(members.decide(23.0)) == {0: 0, 1: 1}


def test_who_never_called_init_is_named_where_there_are_too_few():
    members = Membership(Rules(2, 1, timeout=12.0), 0.0)
    members.hosts_found([Host("a", 2)], 0.0)
    members.decide(0.0)
    members.asks(0, (), 1.0)
    code, why = members.decide(12.0).over
    assert code == 1
    assert why.endswith("after 12 s (--elastic-timeout); process 1 on a did not call init")


def test_the_first_start_may_take_the_start_timeout():
    """A short --elastic-timeout is for later; until processes are there, it counts all the same."""
    members = Membership(Rules(2, 1, timeout=12.0), 0.0, start_timeout=100.0)
    members.hosts_found([Host("a", 1)], 0.0)
    members.decide(0.0)
    assert members.patience(0.0) == 12.0
    members.hosts_found([Host("a", 2)], 10.0)
    members.decide(10.0)
    assert members.patience(10.0) == 100.0
    members.asks(0, (), 11.0)
    assert members.decide(109.0).over is None
    _, why = members.decide(110.0).over
    assert why.endswith("after 100 s (--start-timeout); process 1 on a did not call init")
    members = Membership(Rules(2, 1, timeout=12.0), 0.0, start_timeout=100.0)
    members.hosts_found([Host("a", 1)], 0.0)
    members.decide(0.0)
    assert "after 12 s (--elastic-timeout)" in members.decide(12.0).over[1]


def test_whoever_has_finished_without_a_rank_is_named():
    members = Membership(Rules(2, 1), 0.0)
    members.hosts_found([Host("a", 2)], 0.0)
    members.decide(0.0)
    members.ended(0, 0, "exited with code 0", 1.0)
    members.asks(1, (), 2.0)
    assert members.decide(2.0).dismiss == {1: "process 0 has finished, and with it the job"}
    members.ended(1, 1, "exited with code 1", 3.0)
    early = "process 0 on a exited with code 0 while others still needed it"
    assert members.decide(3.0).over == (1, f"{early}, so newcomer 1 on a exited with code 1")


def test_a_process_that_fails_before_init_when_another_has_finished_fails_the_job():
    """It was the job's end with code 0, or not, by which of the two came first."""
    members = Membership(Rules(2, 1), 0.0)
    members.hosts_found([Host("a", 2)], 0.0)
    members.decide(0.0)
    members.ended(0, 0, "exited with code 0", 1.0)
    members.ended(1, 7, "exited with code 7", 2.0)
    assert members.decide(2.0).over == (7, "newcomer 1 on a exited with code 7")


def test_all_hosts_may_be_replaced_at_once():
    members = running([Host("a", 2)])
    members.hosts_found([Host("b", 2)], 1.0)
    todo = members.decide(1.0)
    assert ([m.number for m in todo.start], todo.changed, todo.dismiss) == ([2, 3], False, {})
    members.asks(2, (), 2.0)
    assert members.decide(2.0).changed
    for number in (0, 1, 3):
        members.asks(number, (), 3.0)
    todo = members.decide(3.0)
    assert ranks(todo) == {0: 0, 1: 1, 2: 2, 3: 3}  # rank 0 knows how far training was
    # Now those of the old host may go, which ranks have to hear behind what they are.
    assert (todo.changed, members.patience(3.0), members.decide(3.0).changed) == (False, 0.0, True)
    for number in range(4):
        members.asks(number, (), 4.0)
    todo = members.decide(4.0)
    assert (ranks(todo), todo.dismiss) == ({2: 0, 3: 1}, {0: "", 1: ""})


def begun_with_a_newcomer(hosts, more, **rules):
    """Return the members of a job in whose second epoch a newcomer has taken over no state yet."""
    members = running(hosts, **rules)
    for number in list(members.members):
        members.learns(number, 0.0)
    members.hosts_found(more, 1.0)
    (newcomer,) = members.decide(1.0).start
    for number in range(newcomer.number + 1):
        members.asks(number, (), 2.0)
    return members, ranks(members.decide(2.0))


def test_who_has_a_rank_but_no_state_yet_does_not_lead():
    two = [Host("a", 1), Host("b", 1)]
    members, seats = begun_with_a_newcomer(two, [Host("a", 2), Host("b", 1)], min_np=2)
    assert seats == {0: 0, 2: 1, 1: 2}
    members.ended(0, 137, "was killed", 3.0)
    for number in (1, 2):
        members.asks(number, (0,), 3.0)
    assert ranks(members.decide(3.0)) == {1: 0, 2: 1}


def test_the_job_does_not_begin_anew_where_who_knows_its_state_is_lost():
    members, _ = begun_with_a_newcomer([Host("a", 1)], [Host("a", 1), Host("b", 1)])
    members.ended(0, 137, "was killed", 3.0)
    members.asks(1, (0,), 3.0)
    assert members.decide(3.0).over == (137, "rank 0 on a was killed")


def test_ranks_of_a_failed_host_stay_where_those_elsewhere_have_no_state_yet():
    members, _ = begun_with_a_newcomer([Host("a", 2)], [Host("a", 2), Host("b", 1)])
    members.ended(0, 137, "was killed", 3.0)
    for number in (1, 2):
        members.asks(number, (0,), 3.0)
    todo = members.decide(3.0)
    assert (todo.dismiss, ranks(todo)) == ({}, {1: 0, 2: 1})


def test_ranks_whose_hosts_have_gone_stay_until_a_newcomer_has_their_state():
    members, seats = begun_with_a_newcomer([Host("a", 1)], [Host("b", 1)])
    assert seats == {0: 0, 1: 1}
    assert not members.decide(2.0).changed
    members.learns(1, 3.0)
    assert members.decide(3.0).changed
    for number in (0, 1):
        members.asks(number, (), 4.0)
    todo = members.decide(4.0)
    assert (ranks(todo), todo.dismiss) == ({1: 0}, {0: ""})


def test_hosts_that_come_back_are_not_too_many():
    members = running([Host("a", 2)], np=2, max_np=2)
    members.hosts_found([Host("b", 2)], 1.0)
    assert len(members.decide(1.0).start) == 2
    members.hosts_found([Host("a", 2), Host("b", 2)], 2.0)
    for number in range(4):
        members.asks(number, (), 3.0)
    todo = members.decide(3.0)
    assert (ranks(todo), todo.dismiss) == ({0: 0, 1: 1}, {2: "", 3: ""})


STOPPED = 143, "the job was ended by SIGTERM"


def test_who_saves_when_the_user_ends_the_job_has_no_limit():
    """Neither where others have lost it, nor where it was to leave."""
    members = running()
    members.hosts_found(TWO[:1], 1.0)
    members.asks(2, (3,), 1.0)
    members.stop(*STOPPED)
    members.asks(0, (1,), 2.0)
    todo = members.decide(1000.0)
    assert (todo.kill, todo.start, todo.over) == ([], [], None)
    assert todo.dismiss == {0: STOPPED[1], 2: ""}  # who asks is not left to wait
    for number in (2, 3, 1):
        members.ended(number, 0, "exited with code 0", 1001.0)
    assert members.decide(1001.0).over is None
    members.ended(0, LOST_PEER, "lost another rank", 1002.0)
    todo = members.decide(1002.0)
    assert todo.over[0] == LOST_PEER
    assert todo.notes == []  # no host is barred any more


def test_who_is_frozen_when_the_user_ends_the_job_is_killed():
    members = running(TWO[:1])
    assert members.late() == []
    members.stop(*STOPPED)
    assert members.late() == [0, 1]
    members.ended(0, 0, "exited with code 0", 1.0)
    members.silent(1, 1.0)
    assert members.late() == []
    assert [m.number for m in members.decide(1.0 + FENCE).kill] == [1]


def test_a_job_that_the_user_ends_before_anything_was_done_has_the_signals_code():
    members = Membership(Rules(2, 1), 0.0)
    members.hosts_found(TWO[:1], 0.0)
    members.decide(0.0)
    members.hosts_found([Host("b", 2)], 0.0)  # those of a were dropped
    members.stop(*STOPPED)
    for number in (0, 1):
        members.ended(number, 0, "exited with code 0", 1.0)
    assert members.decide(1.0).over == STOPPED


class Anything(RuleBasedStateMachine):
    """Hosts come and go, members ask, end and are lost, in any order, until the user ends it."""

    @initialize(
        np=st.integers(1, 3),
        more=st.none() | st.integers(0, 3),
        resets=st.none() | st.integers(0, 4),
        cooldown=st.none() | st.just((1.0, 8.0)),
    )
    def begin(self, np, more, resets, cooldown):
        self.now, self.over, self.epoch, self.finished = 0.0, None, 0, False
        self.stopped = False
        self.rules = Rules(np, 1, None if more is None else np + more, resets, 30.0, cooldown)
        self.members = Membership(self.rules, 0.0, lambda: 0.5)
        self.alive, self.asked, self.gone, self.hosts = {}, set(), set(), {}
        self.seats, self.dismissed, self.known, self.ever = {}, set(), set(), set()

    @rule(slots=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), max_size=4))
    def find(self, slots):
        self.hosts = slots
        self.members.hosts_found([Host(name, n) for name, n in slots.items()], self.now)
        self.decide()

    @precondition(lambda self: set(self.alive) - self.asked)
    @rule(data=st.data())
    def ask(self, data):
        number = data.draw(st.sampled_from(sorted(set(self.alive) - self.asked)))
        lost = data.draw(st.sets(st.integers(0, 3)))
        self.asked.add(number)
        self.members.asks(number, lost, self.now)
        self.decide()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 1, 137]))
    def end(self, data, code):
        number = data.draw(st.sampled_from(sorted(self.alive)))
        # Of those who have no rank, only before there are any; nobody who was sent away.
        dropped = self.members.members[number].dropped
        of_the_job = number in self.seats if self.epoch else not dropped
        self.finished |= code == 0 and of_the_job and number not in self.dismissed
        del self.alive[number]
        self.asked.discard(number)
        self.members.ended(number, code, "ended", self.now)
        self.decide()

    @precondition(lambda self: set(self.alive) & set(self.seats) - self.asked)
    @rule(data=st.data())
    def learn(self, data):
        there = set(self.alive) & set(self.seats) - self.asked
        number = data.draw(st.sampled_from(sorted(there)))
        self.known.add(number)
        self.members.learns(number, self.now)
        self.decide()

    @precondition(lambda self: self.alive and self.epoch)
    @rule()
    def stop(self):
        self.stopped = True
        self.members.stop(*STOPPED)
        self.decide()

    @rule(seconds=st.sampled_from([0.5, 2.0, 8.0, 40.0]))
    def wait(self, seconds):
        self.now += seconds
        self.decide()

    def decide(self):
        if self.over is not None:
            return
        todo = self.members.decide(self.now)
        for member in todo.start:
            assert not self.finished
            assert not self.stopped
            assert member.number not in self.alive
            taken = [(m.host, m.local) for m in self.alive.values()]
            assert (member.host, member.local) not in taken
            assert member.local < self.hosts[member.host]
            self.alive[member.number] = member
        if todo.seats:
            self.seated(todo.seats)
        for number, why in todo.dismiss.items():
            assert number in self.asked
            dropped = self.members.members[number].dropped
            assert dropped or self.finished or self.stopped
            newcomer = bool(self.epoch) and number not in self.ever
            assert bool(why) == (not dropped and not newcomer)
            self.asked.discard(number)
            self.dismissed.add(number)
        for member in todo.kill:
            assert member.number in self.alive
            assert not self.stopped
            assert member.number not in self.gone  # once
            self.gone.add(member.number)
        self.over = todo.over
        if self.stopped:
            assert (self.over is not None) == (not self.alive)
        most = self.rules.max_np
        there = [m for m in self.alive.values() if not m.dropped]
        assert most is None or sum(m.local < self.hosts.get(m.host, 0) for m in there) <= most

    def seated(self, seats):
        assert not self.finished
        assert not self.stopped
        assert set(seats) <= self.asked
        assert {s.epoch for s in seats.values()} == {self.epoch + 1}
        assert {s.size for s in seats.values()} == {len(seats)}
        assert sorted(s.rank for s in seats.values()) == list(range(len(seats)))
        assert len(seats) >= (self.rules.min_np if self.epoch else self.rules.np)
        first = next(number for number, s in seats.items() if s.rank == 0)
        old = set(self.seats) & set(seats)
        assert not self.epoch or first in old
        assert not self.known or first in self.known  # who leads knows how far training was
        for host in {self.alive[n].host for n in seats}:
            there = [s for n, s in seats.items() if self.alive[n].host == host]
            assert sorted(s.local_rank for s in there) == list(range(len(there)))
            assert {s.local_size for s in there} == {len(there)}
            own = sorted(s.rank for s in there)
            assert own == list(range(own[0], own[0] + len(own)))  # side by side
        missing = set(self.seats) & set(self.alive) - set(seats)
        assert all(self.alive[n].dropped for n in missing)
        self.epoch += 1
        self.seats, self.ever = seats, self.ever | set(seats)
        self.asked -= set(seats)

    @invariant()
    def nobody_waits_in_vain(self):
        if self.over is not None or not self.epoch:
            return
        ranked = [n for n, m in self.alive.items() if n in self.seats and not m.dropped]
        waiting = [n for n in ranked if n in self.asked]
        assert not waiting or len(waiting) < len(ranked) or len(ranked) < self.rules.min_np


TestAnything = Anything.TestCase


@pytest.mark.parametrize(
    "told",
    [b"", b"x", b"-1", b"9" * 10, b"\xff", b"[]", b"[" * 100_000, b'{"question": 2}',
     b'{"question": 2, "lost": [1e400]}', b'{"question": 2, "lost": [null]}'],
)  # fmt: skip
def test_what_no_member_of_ours_has_left_says_nothing(told):
    assert (met_epoch(told), leaving_code(told), Question.unpack(told)) == (None, None, None)


def test_what_a_member_has_left_is_read():
    assert (met_epoch(b"12"), leaving_code(b"137"), leaving_code(b"?")) == (12, 137, None)
    for question in (Question(1, ()), Question(3, (0, 2))):
        assert Question.unpack(question.pack()) == question
