"""The link between launcher and wrapper."""

from __future__ import annotations

import os
import socket
import time

from launched_jobs import (
    needs_torch,
    until,
)

from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.handshake import Keys
from ringlet.ring.wire.launch_link import Channel, Kind

pytestmark = needs_torch


def pair() -> tuple[Channel, Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    listener.close()
    return Channel(one, Keys(b"one", b"two")), Channel(two, Keys(b"two", b"one"))


def test_kernels_tell_how_long_the_other_host_is_silent() -> None:
    ends = pair()
    time.sleep(2.5)  # no word of ours, but the kernels ask each other
    assert max(end.silence() for end in ends) < 2.0
    for end in ends:
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    time.sleep(2.5)
    assert min(end.silence() for end in ends) >= 2.4
    for end in ends:
        end.close()
        assert end.silence() == 0.0


def test_frames_arrive_whole_and_in_order() -> None:
    one, two = pair()
    bodies = [os.urandom(length) for length in (0, 1, 70_000, 2_000_000, 3)]
    for body in bodies:
        one.send(Kind.STDOUT, body)
    got: list[bytes] = []

    def all_there() -> bool:
        one.flush()
        got.extend(body for _, body in two.receive())
        return len(got) == len(bodies)

    until(all_there)
    assert got == bodies
    one.close()
    until(lambda: list(two.receive()) == [] and two.closed)
    two.close()


def test_frames_that_the_other_end_has_not_made() -> None:
    one, two = pair()
    one._outgoing += bytes(100)
    one.flush()

    def refused() -> bool:
        try:
            list(two.receive())
        except ProtocolError:
            return True
        return False

    until(refused)
    one.close()
    two.close()
