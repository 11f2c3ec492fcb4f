"""Connections that gloo made: who is at their other ends, which have ended, who inherits them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ringlet.ring import interrupt
from ringlet.ring.interrupt import (
    Connections,
    held,
    hold,
    nearest_and_farthest,
    remember,
    watched,
)
from ringlet.ring.transports.local import LocalWorld

WAIT = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[Connections, socket.socket, Connections, socket.socket]]:
    """Two ends of one connection, each with what was watched while it was made."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with watched() as near:
            one = stack.enter_context(socket.create_connection(listener.getsockname()))
            os.set_inheritable(one.fileno(), True)  # as gloo leaves them
        with watched() as far:
            other = stack.enter_context(listener.accept()[0])
        other.settimeout(WAIT)
        yield near, one, far, other


Pair = tuple[Connections, socket.socket, Connections, socket.socket]


def test_how_far_the_other_end_is(pair: Pair) -> None:
    near, one, far, other = pair
    one.sendall(b"x")
    other.sendall(other.recv(1))
    one.recv(1)
    for end in (near, far):
        (trip,) = end.trips()
        assert trip is not None
        assert 0 <= trip < 0.1
    one.close()
    other.close()
    assert near.trips() == [None]
    assert Connections().trips() == []


def test_strangers_who_have_connected_do_not_say_how_far_ranks_are() -> None:
    a, b, c, stranger = (("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3), ("10.0.0.9", 9))
    ends = [[(a, b), (a, stranger), (a, c)], [(b, a), (b, c)], [(stranger, c), (c, a), (c, b)]]
    trips = [[0.001, 0.5, 0.003], [0.002, None], [1e-6, 0.004, 0.002]]
    assert nearest_and_farthest(ends, trips) == (0.001, 0.004)
    hidden = [[(stranger, b), (a, c)], *ends[1:]]  # a's address is another one to b
    assert nearest_and_farthest(hidden, [[0.001, 0.003], *trips[1:]]) == (1e-6, 0.004)
    assert nearest_and_farthest([[], []], [[], []]) == (0.0, 0.0)


def test_ranks_learn_who_is_at_the_other_end(pair: Pair) -> None:
    near, one, far, other = pair
    ends = [near.ends(), [], far.ends()]
    near.introduce(ends, 0)
    far.introduce(ends, 2)
    assert near.to(2) == [one.fileno()]
    assert far.to(0) == [other.fileno()]
    assert near.to(1) == near.severed() == far.severed() == []
    near.cut(one.fileno())
    assert other.recv(1) == b""
    assert near.severed() == [2]
    assert far.severed() == [0]


def test_what_the_programs_threads_open_meanwhile_is_left_to_them() -> None:
    """A connection between two of them, and one to elsewhere: neither leads to a rank."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connection() -> tuple[socket.socket, socket.socket]:
            one = stack.enter_context(socket.create_connection(listener.getsockname()))
            return one, stack.enter_context(listener.accept()[0])

        with watched() as near:
            own, within, elsewhere = connection(), connection(), connection()
        with watched() as far:
            other = stack.enter_context(socket.socket(fileno=os.dup(own[1].fileno())))
        own[1].close()
        elsewhere[1].close()
        near.introduce([near.ends(), far.ends()], 0)
        assert near.to(1) == [own[0].fileno()]
        for end in within:
            end.close()
        assert near.severed() == []
        near.interrupt()
        assert other.recv(1) == b""
        assert elsewhere[0].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert elsewhere[0].send(b"x") == 1


def test_what_was_closed_has_ended_whoever_has_the_number_now(pair: Pair) -> None:
    near, one, far, _ = pair
    near.introduce([[], far.ends()], 0)
    number = one.fileno()
    one.close()
    another = os.open(os.devnull, os.O_RDONLY)
    if another != number:
        os.dup2(another, number)
        os.close(another)
    assert near.severed() == [1]
    near.interrupt()  # which does nothing to it
    near.give_up()
    assert os.read(number, 1) == b""
    os.close(number)


@pytest.mark.parametrize("taken", [False, True], ids=["closed", "closed and taken"])
def test_what_is_closed_while_it_is_looked_at_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    near, one, far, _ = pair
    near.introduce([[], far.ends()], 0)
    number, copy, nothing = one.fileno(), os.dup, os.open(os.devnull, os.O_RDONLY)

    def closing(descriptor: int) -> int:
        assert descriptor == number
        one.close()
        if taken:
            os.dup2(nothing, number)
        return copy(number)

    monkeypatch.setattr(os, "dup", closing)
    assert near.severed() == [1]
    monkeypatch.undo()
    os.close(nothing)
    if taken:
        os.close(number)


def test_without_a_descriptor_left_connections_stand_and_can_be_ended(pair: Pair) -> None:
    """Else a rank that has opened too many files would tell that it has lost all others."""
    near, one, far, other = pair
    near.introduce([[], far.ends()], 0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # those that are open stay
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(one.fileno())
        severed, trips = near.severed(), near.trips()
        near.interrupt()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert severed == []
    assert [trip is not None and trip > 0 for trip in trips] == [True]
    assert other.recv(1) == b""
    assert near.severed() == [1]
    assert one.fileno() >= 0


def test_addresses_that_nobody_knows_name_nobody(pair: Pair) -> None:
    near, _, _, _ = pair
    near.introduce([[(("10.0.0.1", 1), ("10.0.0.2", 2))], []], 1)
    near.interrupt()
    assert near.severed() == []


def test_programs_that_are_started_do_not_inherit_them(pair: Pair) -> None:
    _, one, _, _ = pair
    assert not os.get_inheritable(one.fileno())


def test_a_forked_child_does_not_keep_them_open(pair: Pair) -> None:
    near, one, _, other = pair
    comm = LocalWorld(1).communicators[0]
    remember(comm, near)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        while True:
            signal.pause()
    try:
        assert os.read(ready, 1) == b"x"
        one.sendall(b"still here")
        assert other.recv(100) == b"still here"  # the child has ended nothing
        one.close()
        assert other.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def test_connections_are_held_while_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_holders", weakref.WeakSet())

    class Holder:
        pass

    one, other = Holder(), Holder()
    hold(one)
    hold(other)
    hold(one, False)
    assert held()
    del other
    assert not held()


class Waiting:
    """Something that wants to know."""

    told = 0

    def interrupt(self) -> None:
        self.told += 1


def test_whoever_waits_is_told_of_an_interruption_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_known", weakref.WeakKeyDictionary())
    monkeypatch.setattr(interrupt, "_waiting", weakref.WeakSet())
    waiting, comm = Waiting(), LocalWorld(1).communicators[0]
    interrupt.notify(waiting)
    order: list[int] = []

    class Means:
        def interrupt(self) -> None:
            order.append(waiting.told)

    means = Means()
    remember(comm, means)
    interrupt.interrupt_all()
    assert (order, waiting.told) == ([0], 1)
