"""Who is let in at a port of the job, and who has to go when too many come: without sockets."""

from __future__ import annotations

import errno
import random
from collections import deque
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringlet.ring.wire import admission as module
from ringlet.ring.wire.admission import Admission, Admitted, network_of
from ringlet.ring.wire.handshake import CLAIM, GREETING, REFUSED, Claim, claim_from

SECRET = bytes(32)
PATIENCE = 5.0
SIZE = 4
EXPECTED = SIZE - 1
ROOM = 24  # strangers, in these tests, besides those expected
HOST = "10.0.0.1"  # that of all ranks
FLOODS = {
    "an address": lambda _: "10.0.0.9",
    "the ranks' own address": lambda _: HOST,
    "few addresses": lambda n: f"10.0.1.{n % 2}",
    "a network of IPv6": lambda n: f"2001:db8:0:1::{n:x}",
    "many addresses": lambda n: f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}",
    "many networks of IPv6": lambda n: f"2001:db8:0:{n & 65535:x}::1",
}
ELSEWHERE = [name for name in FLOODS if not name.startswith(("many", "the ranks'"))]


class End:
    """The listening end of a connection, as a socket; and what its other end knows."""

    def __init__(self, number: int) -> None:
        self.number, self.closed = number, False
        self.said = b""  # to the other end
        self.unread = b""
        self.gone = False  # the other end has closed it

    def fileno(self) -> int:
        return self.number

    def setblocking(self, _: bool) -> None:
        pass

    def recv(self, most: int) -> bytes:
        assert not self.closed
        if not self.unread and not self.gone:
            raise BlockingIOError
        data, self.unread = self.unread[:most], self.unread[most:]
        return data

    def send(self, data: bytes) -> int:
        assert not self.closed
        self.said += data
        return len(data)

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class World:
    """A listener, a poller and a clock, for one ``Admission`` of ranks below SIZE."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int = ROOM, seed: int = 0) -> None:
        self.now, self.short, self.listening = 100.0, False, True
        self.waiting: deque[tuple[End, tuple[str, int]]] = deque()
        self.polled: dict[int, End | None] = {}
        self.numbers = count(10)
        self.joined: dict[int, Admitted] = {}
        chance = random.Random(seed)
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(module, "epoll", lambda: self)
        patch.setattr(module, "_any_below", chance.randrange)
        for name, value in (("ROOM", room), ("LEAST", room), ("FEW", EXPECTED)):
            patch.setattr(module, name, value)
        self.epoll_closed = False
        listener: Any = SimpleNamespace(
            accept=self._accept,
            fileno=lambda: 3 if self.listening else -1,
            setblocking=lambda _: None,
            close=lambda: setattr(self, "listening", False),
        )
        self.ends: dict[int, End] = {}  # that were accepted
        self.admission = Admission(listener, self._secret_of, EXPECTED, PATIENCE)

    def _secret_of(self, who: Claim) -> bytes | None:
        return SECRET if 0 < who.rank < SIZE and who.rank not in self.joined else None

    def _accept(self) -> tuple[End, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "nobody")
        if self.short:
            raise OSError(errno.EMFILE, "Too many open files")
        end, peer = self.waiting.popleft()
        self.ends[end.number] = end
        return end, peer

    # As a poller.

    @property
    def closed(self) -> bool:
        return self.epoll_closed

    def register(self, number: int, _: int) -> None:
        assert number not in self.polled
        self.polled[number] = self.ends.get(number)

    def unregister(self, number: int) -> None:
        del self.polled[number]

    def poll(self, _: float) -> list[tuple[int, int]]:
        ready = {n for n, end in self.polled.items() if end and (end.unread or end.gone)}
        if 3 in self.polled and self.waiting:
            ready.add(3)
        return [(number, 1) for number in ready]

    def close(self) -> None:
        self.epoll_closed = True

    # As whoever comes.

    def come(self, address: str) -> End:
        end = End(next(self.numbers))
        self.waiting.append((end, (address, 1)))
        return end

    def join_during(self, kind: str, strangers: int, trip: float) -> list[int]:
        """Let all ranks answer after ``trip`` seconds of strangers; return who was let in."""
        ends = {rank: self.come(HOST) for rank in range(1, SIZE)}
        self.serve()
        self.flood(kind, strangers, trip)
        for rank, end in ends.items():
            claim(end, rank)
        return sorted(self.serve())

    def serve(self) -> list[int]:
        """Serve until nothing is left to do; return the ranks that were let in."""
        ranks = []
        while self.poll(0):
            for each in self.admission.serve():
                self.joined[each.who.rank] = each
                ranks.append(each.who.rank)
            if self.short:
                break
        return ranks

    def flood(self, kind: str, number: int, seconds: float) -> None:
        """Have so many strangers come, in so many seconds."""
        for _ in range(number):
            self.come(FLOODS[kind](next(self.numbers)))
            self.now += seconds / number
            self.serve()


def claim(end: End, rank: int, secret: bytes = SECRET) -> None:
    """Have the other end say which rank it is."""
    end.unread += claim_from(end.said[:GREETING], secret, Claim(0, rank, SIZE))[0]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_networks() -> None:
    assert network_of("127.0.0.1") != network_of("127.0.0.2")
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8:0:2::1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth1")
    assert network_of("::ffff:10.0.0.1") != network_of("::ffff:10.0.0.2")


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(ELSEWHERE),
    strangers=st.integers(0, 300),
    trip=st.floats(0.0, 0.99 * PATIENCE),
)
def test_a_flood_from_elsewhere_keeps_no_rank_out_however_slow_it_is(
    kind: str, strangers: int, trip: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)
        world.flood(kind, 2 * ROOM, 1.0)
        assert world.join_during(kind, strangers, trip) == list(range(1, SIZE))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(FLOODS)), rate=st.integers(1, ROOM), trip=st.floats(0.0, 0.99))
def test_where_there_is_room_for_a_second_of_a_flood_no_rank_is_sent_away(
    kind: str, rate: int, trip: float
) -> None:
    """Those who are silent for longer make room, also where all come from the ranks' host."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(patch)
        world.flood(kind, 4 * rate, 4.0)
        assert world.join_during(kind, int(rate * trip), trip) == list(range(1, SIZE))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", FLOODS)
def test_ranks_that_try_again_get_in_though_a_flood_is_faster_than_they(
    monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """In a round trip twice as many strangers come as there is room: each try has its chance."""
    world = World(monkeypatch, seed=seed)
    missing = set(range(1, SIZE))
    for _ in range(100):
        ends = {rank: world.come(HOST) for rank in missing}
        world.serve()
        world.flood(kind, 2 * (ROOM + EXPECTED), 0.1)
        for rank, end in ends.items():
            if not end.closed:
                claim(end, rank)
        missing -= set(world.serve())
        if not missing:
            return
    raise AssertionError(f"ranks {missing} did not get in")


def test_a_host_with_many_ranks_is_no_flood(world: World) -> None:
    """Though more come from it than from any other address."""
    ranks = [world.come(HOST) for _ in range(EXPECTED)]
    world.serve()
    gone = 0
    for each in range(200):
        stranger = world.come(FLOODS["many addresses"](each))
        world.serve()
        gone += sum(end.closed for end in ranks)
        for number, end in enumerate(ranks):
            if end.closed:
                ranks[number] = world.come(HOST)
        assert not stranger.closed
    # Of so many who had to go, no more than their share.
    assert gone < 2 * 200 * EXPECTED / (ROOM + EXPECTED)


def test_where_ranks_are_as_many_as_strangers_may_be_none_has_to_go(world: World) -> None:
    world.admission.expect(200)
    ends = [world.come(HOST) for _ in range(200)]
    world.serve()
    assert not any(end.closed for end in ends)


def test_a_claim_is_refused_that_is_false_or_too_long(world: World) -> None:
    ends = [world.come(HOST) for _ in range(4)]
    world.serve()
    ends[0].unread = bytes(CLAIM)
    claim(ends[1], 1, secret=b"x" * 32)
    claim(ends[2], SIZE)
    claim(ends[3], 1)
    ends[3].unread += b"!"
    assert world.serve() == []
    assert all(end.closed and end.said[GREETING:] == REFUSED for end in ends)
    assert len(world.admission) == 0


def test_a_rank_that_comes_twice_in_a_turn_is_let_in_once(world: World) -> None:
    ends = [world.come(HOST) for _ in range(2)]
    world.serve()
    for end in ends:
        claim(end, 1)
    assert world.serve() == [1]
    assert sorted(end.said[GREETING:] == REFUSED for end in ends) == [False, True]


def test_a_claim_may_come_in_pieces_but_not_for_ever(world: World) -> None:
    ends = [world.come(HOST) for _ in range(2)]
    world.serve()
    for rank, end in enumerate(ends, 1):
        claim(end, rank)
        end.rest, end.unread = end.unread[1:], end.unread[:1]  # type: ignore[attr-defined]
    assert world.serve() == []
    world.now += PATIENCE - 0.1
    ends[0].unread = ends[0].rest  # type: ignore[attr-defined]
    assert world.serve() == [1]
    left = world.admission.time_left()
    assert left is not None
    assert left == pytest.approx(0.1)
    world.now += 0.2
    assert world.admission.time_left() == 0.0
    assert list(world.admission.serve()) == []
    assert ends[1].closed
    assert world.admission.time_left() is None


def test_without_a_descriptor_those_who_may_be_ranks_stay_and_others_wait(world: World) -> None:
    ends = [world.come(HOST) for _ in range(EXPECTED)]
    world.serve()
    world.short = True
    late = world.come(HOST)
    world.serve()
    assert 3 not in world.polled  # it would be asked again and again
    assert world.admission.time_left() == pytest.approx(module.PAUSE)
    assert world.admission.shortage is not None
    assert not any(end.closed for end in ends)
    world.now += module.PAUSE  # whatever was chosen to be polled by now
    assert world.admission.time_left() == 0.0
    world.short = False
    assert list(world.admission.serve()) == []
    assert late.said
    assert 3 in world.polled


@pytest.mark.parametrize("why", ["slow", "many"])
def test_without_a_descriptor_strangers_make_room(world: World, why: str) -> None:
    ends = [world.come(HOST) for _ in range(EXPECTED + (why == "many"))]
    world.serve()
    if why == "slow":
        world.now += module.SLOW
    late, accept = world.come(HOST), world.admission._listener.accept

    def short_until_one_goes() -> tuple[Any, Any]:
        world.short = not any(end.closed for end in ends)
        return accept()

    world.admission._listener.accept = short_until_one_goes  # type: ignore[method-assign]
    world.serve()
    assert sum(end.closed for end in ends) == 1
    assert late.said
    assert world.admission.shortage is None
    assert ends[0].closed or why == "many"


class Door(RuleBasedStateMachine):
    """Whatever comes in whatever order, nothing is forgotten, and nobody is held too long."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world = World(self.patch, room=6)
        self.came: list[End] = []

    def teardown(self) -> None:
        if not self.world.admission.closed:
            self.shut()
        self.patch.undo()

    def open_ends(self) -> list[End]:
        return [end for end in self.came if not end.closed and end.said]

    @rule(
        address=st.sampled_from([HOST, "10.0.0.9", "2001:db8::1", "2001:db8::2", "::1"]),
        number=st.integers(1, EXPECTED + 1),
    )
    def come(self, address: str, number: int) -> None:
        self.came.extend(self.world.come(address) for _ in range(number))
        self.world.serve()

    @precondition(lambda self: self.open_ends())
    @rule(data=st.data(), what=st.sampled_from(["byte", "junk", "leave", "lie", "prove"]))
    def speak(self, data: st.DataObject, what: str) -> None:
        admitted = [each.sock for each in self.world.joined.values()]
        ends = [end for end in self.open_ends() if end not in admitted]
        if not ends:
            return
        end = data.draw(st.sampled_from(ends))
        if what in ("byte", "junk"):
            end.unread += b"x" * (1 if what == "byte" else 2 * CLAIM)
        elif what == "leave":
            end.gone = True
        else:
            rank = data.draw(st.integers(1, EXPECTED))
            clean = not end.unread and not self.world.admission._strangers[end.number].claim
            claim(end, rank, SECRET if what == "prove" else b"x" * 32)
            free = rank not in self.world.joined
            if what == "prove" and clean and free and not end.gone:
                # One whose time is not up yet, and who is heard at all, is let in.
                self.world.serve()
                assert self.world.joined[rank].sock is end

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.1, 5.1]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(short=st.booleans())
    def descriptors(self, short: bool) -> None:
        self.world.short = short

    @rule()
    def turn(self) -> None:
        for each in self.world.admission.serve():
            self.world.joined[each.who.rank] = each
        limit = self.world.now - PATIENCE
        assert all(each.since > limit for each in self.world.admission._strangers.values())

    @invariant()
    def nothing_is_forgotten(self) -> None:
        admission, world = self.world.admission, self.world
        admitted = {each.sock.fileno() for each in world.joined.values()}
        strangers = {end.number for end in self.open_ends()} - admitted
        assert strangers == set(admission._strangers)
        assert strangers == set(world.polled) - {3}
        assert len(admission) <= 6 + EXPECTED
        assert (admission.time_left() is None) == (not strangers and 3 in world.polled)
        near = [each for every in admission._networks.values() for each in every]
        assert sorted(near) == sorted(strangers)
        for name, every in admission._networks.items():
            assert every
            assert (name in admission._crowds) == (len(every) > EXPECTED)

    def shut(self) -> None:
        admitted = [each.sock for each in self.world.joined.values()]
        self.world.admission.close()
        self.world.admission.close()
        assert list(self.world.admission.serve()) == []
        assert not [end for end in self.open_ends() if end not in admitted]
        assert not any(sock.closed for sock in admitted)  # type: ignore[attr-defined]


Door.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDoor = Door.TestCase
