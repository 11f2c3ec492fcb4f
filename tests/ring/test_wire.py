"""Handshake and frames by themselves: what gets through, and what nobody in between may do."""

from __future__ import annotations

import secrets
import socket
import threading
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.framing import (
    OVERHEAD,
    TAG,
    Incoming,
    Outgoing,
    derive,
    seal,
    unseal,
)
from ringlet.ring.wire.handshake import (
    CLAIM,
    GREETING,
    REFUSED,
    WELCOME,
    Claim,
    Keys,
    Listening,
    Unwelcome,
    claim_from,
    connect_as,
)

KEY = secrets.token_bytes(32)
WHO = Claim(1, 2, 3)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=70)), max_size=6),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_frames_survive_any_cut(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    out, come = Outgoing(KEY), Incoming(KEY, {0, 1, 2}, 70)
    data = b"".join(out.frame(kind, body) for kind, body in frames)
    heard: list[tuple[int, bytes]] = []
    for cut in cuts:
        heard += come.feed(data[:cut])
        data = data[cut:]
    assert heard + come.feed(data) == frames


def test_large_frames_take_time_in_proportion() -> None:
    out, come = Outgoing(KEY), Incoming(KEY, {0}, 32 << 20)
    data = out.frame(0, bytes(32 << 20))
    heard = []
    for start in range(0, len(data), 1 << 12):  # 8192 pieces: copied each time, that were 128 GiB
        heard += come.feed(data[start : start + (1 << 12)])
    assert [(kind, len(body)) for kind, body in heard] == [(0, 32 << 20)]


@given(st.data())
def test_a_changed_bit_is_noticed(data: st.DataObject) -> None:
    out, come = Outgoing(KEY), Incoming(KEY, range(256), 1 << 20)
    frames = [bytearray(out.frame(7, bytes([n]) * 20)) for n in range(3)]
    which = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(frames[which]) - 1))
    frames[which][place] ^= 1 << data.draw(st.integers(0, 7))
    heard: list[tuple[int, bytes]] = []

    def listen() -> None:
        for frame in (*frames, bytes(1 << 20)):  # what is still missing after a length that grew
            heard.extend(come.feed(bytes(frame)))

    with pytest.raises(ProtocolError):
        listen()
    assert heard == [(7, bytes([n]) * 20) for n in range(len(heard))]
    assert len(heard) <= which


@given(st.permutations(range(5)), st.integers(0, 5), st.integers(0, 4))
def test_frames_cannot_be_left_out_repeated_or_reordered(
    order: list[int], length: int, again: int
) -> None:
    out, come = Outgoing(KEY), Incoming(KEY, {0}, 100)
    frames = [out.frame(0, b"%d" % n) for n in range(5)]
    sent = [*order[:length], again]
    good = next((n for n, which in enumerate(sent) if n != which), len(sent))
    for which in sent[:good]:
        assert come.feed(frames[which]) == [(0, b"%d" % which)]
    if good < len(sent):
        with pytest.raises(ProtocolError, match="changed, repeated or left out"):
            come.feed(b"".join(frames[which] for which in sent[good:]))


@given(st.binary(max_size=300), st.data())
def test_what_is_torn_is_never_taken_for_a_frame(body: bytes, data: st.DataObject) -> None:
    out, come = Outgoing(KEY), Incoming(KEY, {0}, 1 << 10)
    frame, following = out.frame(0, body), out.frame(0, b"the next")
    torn = frame[: data.draw(st.integers(0, len(frame) - 1))]
    assert come.feed(torn) == []
    if torn:  # whatever is taken for its end
        with pytest.raises(ProtocolError):
            come.feed(following + bytes(1 << 10))


@given(st.binary(max_size=60))
def test_frames_of_another_direction_connection_or_purpose_are_refused(body: bytes) -> None:
    _, connecting, listening = shaken(KEY)
    _, elsewhere, _ = shaken(KEY)
    _, beating, _ = shaken(derive(KEY, "heartbeat"), derive(KEY, "heartbeat"))
    frame = Outgoing(connecting.sending).frame(0, body)
    assert Incoming(listening.receiving, {0}, 60).feed(frame) == [(0, body)]
    for key in (connecting.receiving, elsewhere.sending, beating.sending, KEY):
        with pytest.raises(ProtocolError, match="changed, repeated or left out"):
            Incoming(key, {0}, 60).feed(frame)


@given(st.text(max_size=20), st.text(max_size=20), st.binary(max_size=20), st.binary(max_size=20))
def test_a_key_is_for_one_purpose_and_for_the_facts_it_is_made_of(
    one: str, two: str, these: bytes, those: bytes
) -> None:
    assume("\0" not in one + two)  # no purpose has one: it ends there
    same = (one, these) == (two, those)
    assert (derive(KEY, one, these) == derive(KEY, two, those)) is same
    assert derive(KEY, one, these) != derive(bytes(32), one, these)


def test_lengths_and_kinds_are_checked_before_anything_is_kept() -> None:
    for header in ((101).to_bytes(4, "little") + b"\0", bytes(4) + b"\1", b"\xff" * 5):
        with pytest.raises(ProtocolError, match="is not allowed"):
            Incoming(KEY, {0}, 100).feed(header + bytes(TAG))


def shaken(secret: bytes, theirs: bytes = KEY) -> tuple[Claim, Keys, Keys]:
    """Shake hands as a relay would pass it on; return what both ends know then."""
    listening = Listening()
    claim, expected, own = claim_from(listening.greeting, secret, WHO)
    assert (len(listening.greeting), len(claim)) == (GREETING, CLAIM)
    who, welcome, other = listening.answer(claim, lambda _: theirs)
    assert welcome == expected
    assert len(welcome) == WELCOME
    return who, own, other


def test_hands_are_shaken_by_two_that_know_the_secret() -> None:
    who, connecting, listening = shaken(KEY)
    assert vars(who) == vars(WHO)
    assert connecting.sending == listening.receiving != connecting.receiving
    assert connecting.receiving == listening.sending
    assert vars(shaken(KEY)[1]) != vars(connecting)  # fresh ones for each connection
    with pytest.raises(ProtocolError, match="does not know this job's secret"):
        shaken(b"another")
    with pytest.raises(ProtocolError, match="does not know this job's secret"):
        Listening().answer(bytes(CLAIM), lambda _: None)


def test_a_claim_is_of_no_use_elsewhere_and_cannot_be_changed() -> None:
    here, there = Listening(), Listening()
    claim, _, _ = claim_from(here.greeting, KEY, WHO)
    with pytest.raises(ProtocolError):
        there.answer(claim, lambda _: KEY)
    for place in range(CLAIM):
        other = bytearray(claim)
        other[place] ^= 1
        with pytest.raises(ProtocolError):
            here.answer(bytes(other), lambda _: KEY)


def test_whoever_connects_is_told_what_is_wrong() -> None:
    for answers, words in (
        ([b"SSH-2.0-OpenSSH_9.9\r\n" * 3], "is not Ringlet, or not of this version"),
        ([Listening().greeting, REFUSED], "does not take this process for one of the job's"),
        ([Listening().greeting, b"x" * WELCOME], "does not know this job's secret"),
    ):
        one, two = socket.socketpair()
        with one, two:
            two.sendall(b"".join(answers))
            with pytest.raises(Unwelcome, match=words):
                connect_as(one, KEY, WHO, time.monotonic() + 60)
    one, two = socket.socketpair()
    with one, two, pytest.raises(TimeoutError):
        connect_as(one, KEY, WHO, time.monotonic() + 0.05)


def test_over_a_connection() -> None:
    one, two = socket.socketpair()
    found: list[Keys] = []
    with one, two:
        connect = threading.Thread(
            target=lambda: found.append(connect_as(one, KEY, WHO, time.monotonic() + 60))
        )
        connect.start()
        listening = Listening()
        two.sendall(listening.greeting)
        _, welcome, keys = listening.answer(two.recv(CLAIM, socket.MSG_WAITALL), lambda _: KEY)
        two.sendall(welcome)
        connect.join(60)
        two.sendall(Outgoing(keys.sending).frame(5, b"hello"))
        data = one.recv(OVERHEAD + 5, socket.MSG_WAITALL)
        assert Incoming(found[0].receiving, {5}, 10).feed(data) == [(5, b"hello")]


@given(st.binary(max_size=80), st.text(max_size=10), st.integers(0, 9), st.data())
def test_what_is_sealed_cannot_be_changed_or_cut(
    body: bytes, name: str, sender: int, data: st.DataObject
) -> None:
    sealed = bytearray(seal(KEY, name, body, sender))
    assert unseal(KEY, name, bytes(sealed), sender) == body
    place = data.draw(st.integers(0, len(sealed) - 1))
    cut = bytes(sealed[:place])
    sealed[place] ^= 1 << data.draw(st.integers(0, 7))
    for wrong in (bytes(sealed), cut, bytes(sealed) + b"x", b""):
        with pytest.raises(ProtocolError, match="was not made by this job"):
            unseal(KEY, name, wrong, sender)


@given(st.text(max_size=5), st.binary(max_size=20))
def test_what_is_sealed_under_another_name_or_key_or_by_another_is_refused(
    name: str, body: bytes
) -> None:
    key = derive(KEY, "objects")
    sealed = seal(key, name, body, 1)
    for other, called, sender in (
        (derive(KEY, "parcels"), name, 1),
        (key, name + "x", 1),
        (key, "", 1) if name else (key, "x", 1),
        (key, name, 0),
    ):
        with pytest.raises(ProtocolError, match="was not made by this job"):
            unseal(other, called, sealed, sender)
    # Nor can a seal be taken for a frame, or a part of the bytes for one of the name.
    with pytest.raises(ProtocolError):
        unseal(key, name + body[:1].decode("latin-1"), sealed[:32] + body[1:], 0)
