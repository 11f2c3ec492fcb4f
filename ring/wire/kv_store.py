"""The job's store, kept by the launcher: small values by name, which ranks leave for each other.

A request (ASK) is an operation, a number that the answer repeats, and fields behind their lengths.
A rank has one request at a time: a new one ends the wait of the last.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.launch_link import Channel, Kind
from ringlet.ring.wire.listener import Guest

PIECE = 4 << 20  # bytes of a long value under one name
REFUSED = 255  # in the place of the operation in an answer: what was waited for does not come
_HEAD = struct.Struct("!BI")
_LENGTH = struct.Struct("!I")


class Op(enum.IntEnum):
    """What a rank asks of the store, and the fields that go with it."""

    SET = 1  # name, value
    GET = 2  # name: answered once it is there
    WAIT = 3  # names: answered once all are there
    CHECK = 4  # names: b"1" if all are there, else b"0"
    ADD = 5  # name, decimal number: the sum, decimal
    COMPARE = 6  # name, expected (empty: absent), wanted: the value afterwards
    APPEND = 7  # name, value
    DELETE = 8  # name: b"1" if it was there, else b"0"
    COUNT = 9  # the number of names, decimal


def pack(op: int, number: int, fields: Sequence[bytes]) -> bytes:
    """Return the body of a request, or of an answer (operation 0, or REFUSED)."""
    return _HEAD.pack(op, number) + b"".join(_LENGTH.pack(len(f)) + f for f in fields)


def unpack(body: bytes) -> tuple[int, int, list[bytes]]:
    """Return operation, number and fields. Raises ProtocolError for a malformed body."""
    fields: list[bytes] = []
    try:
        op, number = _HEAD.unpack_from(body)
        start = _HEAD.size
        while start < len(body):
            (length,) = _LENGTH.unpack_from(body, start)
            start += _LENGTH.size + length
            if start > len(body):
                raise ProtocolError("a field of a store request ends too late")
            fields.append(body[start - length : start])
    except struct.error as error:
        raise ProtocolError(f"a store request is malformed: {error}") from None
    return op, number, fields


@dataclass
class _Visitor:
    channel: Channel
    waiting: tuple[int, int, list[bytes]] | None = None  # operation, number, names


class KvStore:
    """The values, and the ranks that use them; part of the launcher's loop."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._refused: dict[bytes, str] = {}  # beginnings of names that will not come, and why
        self._visitors: list[_Visitor] = []

    def admit(self, guest: Guest) -> None:
        """Serve somebody who has proved to know the store's key."""
        self._visitors.append(_Visitor(guest.channel))

    def channels(self) -> list[Channel]:
        """Return the connections to poll."""
        return [visitor.channel for visitor in self._visitors]

    def serve(self, ready: set[int]) -> None:
        """Answer what has come; forget who has gone or breaks the protocol."""
        for visitor in self._visitors:
            if visitor.channel.fileno() not in ready:
                continue
            visitor.channel.flush()
            try:
                for kind, body in visitor.channel.receive():
                    if kind is not Kind.ASK:
                        raise ProtocolError(f"a visitor does not send {kind.name}")
                    self._take(visitor, *unpack(body))
            except (ProtocolError, ValueError, IndexError):
                visitor.channel.close()
            if visitor.channel.closed:  # at its other end, perhaps: this one is open still
                visitor.channel.close()
        self._visitors = [v for v in self._visitors if not v.channel.closed]

    def close(self) -> None:
        """Send everybody away."""
        for visitor in self._visitors:
            visitor.channel.close()
        self._visitors.clear()

    def put(self, name: str, value: bytes) -> None:
        """Leave a value of any length for the ranks, who fetch it with ``Client.fetch``."""
        pieces = range(0, len(value), PIECE)
        for i, start in enumerate(pieces):
            self._values[f"{name}/{i}".encode()] = value[start : start + PIECE]
        self._values[name.encode()] = b"%d" % len(pieces)

    def leave(self, name: str, value: bytes) -> None:
        """Set a short value, as a rank does, and answer those who wait for it."""
        self._values[name.encode()] = value
        for visitor in self._visitors:
            self._try(visitor)

    def collect(self, name: str) -> bytes | None:
        """Take a value that a rank has left with ``Client.leave``, None if it has not."""
        count = self._values.get(name.encode())
        if count is None:
            return None
        return b"".join(self._values.pop(f"{name}/{i}".encode()) for i in range(int(count)))

    def refuse(self, beginning: str, why: str) -> None:
        """Tell those who wait for a name that begins so, or will, that it does not come."""
        self._refused[beginning.encode()] = why
        for visitor in self._visitors:
            self._try(visitor)

    def awaited(self) -> set[str]:
        """Return the names that ranks wait for."""
        waits = [visitor.waiting for visitor in self._visitors if visitor.waiting is not None]
        return {name.decode(errors="replace") for _, _, names in waits for name in names}

    def value(self, name: str) -> bytes | None:
        """Return a value as a rank has set it, None if none has."""
        return self._values.get(name.encode())

    def _take(self, visitor: _Visitor, op: int, number: int, fields: list[bytes]) -> None:
        visitor.waiting = None
        if op in (Op.GET, Op.WAIT):
            visitor.waiting = (op, number, fields)
            self._try(visitor)
            return
        answer, changed = self._do(Op(op), fields)
        visitor.channel.send(Kind.ANSWER, pack(0, number, [answer]))
        if changed:
            for other in self._visitors:
                self._try(other)

    def _try(self, visitor: _Visitor) -> None:
        if visitor.waiting is None:
            return
        op, number, names = visitor.waiting
        if all(name in self._values for name in names):
            visitor.waiting = None
            answer = self._values[names[0]] if op == Op.GET else b""
            visitor.channel.send(Kind.ANSWER, pack(0, number, [answer]))
            return
        for beginning, why in self._refused.items():
            if any(name.startswith(beginning) and name not in self._values for name in names):
                visitor.waiting = None
                told = why.encode(errors="backslashreplace")  # a rank's text may be no Unicode
                visitor.channel.send(Kind.ANSWER, pack(REFUSED, number, [told]))
                return

    def _do(self, op: Op, fields: list[bytes]) -> tuple[bytes, bool]:
        """Return the answer, and whether somebody may have waited for this."""
        values = self._values
        if op is Op.CHECK:
            return (b"1" if all(name in values for name in fields) else b"0"), False
        if op is Op.COUNT:
            return b"%d" % len(values), False
        name = fields[0]
        if op is Op.DELETE:
            return (b"0" if values.pop(name, None) is None else b"1"), False
        before = values.get(name)
        if op is Op.ADD:
            values[name] = b"%d" % (int(before or b"0") + int(fields[1]))
            return values[name], before is None
        if op is Op.COMPARE:
            if (before or b"") == fields[1]:
                values[name] = fields[2]
            return values.get(name, fields[1]), before is None and name in values
        values[name] = (before or b"") + fields[1] if op is Op.APPEND else fields[1]
        return b"", before is None
