"""Control messages between engines and their coordinator: one byte of kind, then the body.

Votes and verdicts, which a steady step consists of, are packed; the others are JSON.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# From a rank to the coordinator.
DECLARE = b"D"  # [group name, [request, ...]]
REQUEST = b"R"  # [request, ...]
HITS = b"H"  # set of cached request ids, as a bit vector
VOTE = b"V"  # Vote
FAILED = b"F"  # [group, epoch, text]: this rank cannot go on with a group's step
BROKEN = b"X"  # text: this rank's engine is broken
GOODBYE = b"S"  # this rank shuts down

# From the coordinator to every rank; BROKEN is passed on, FAILED with the ranks that left, if any.
DECLARED = b"d"  # [group name, group, [name, ...]]
REFUSED = b"r"  # [[request name, ...] or group name, text, [rank that left, ...]]
EXECUTE = b"E"  # [group, [[name, cache id, sizes by rank], ...]]
EXECUTE_HITS = b"h"  # group, then cached request ids
GO = b"G"  # Verdict, then the payloads' bytes by rank
LOST = b"L"  # [rank, text]
GONE = b"g"  # rank: its goodbye has been heard, and nothing after this needs it

_VOTE = struct.Struct("<cIIIQ")
_GO = struct.Struct("<cIII")


class Vote(NamedTuple):
    """A rank has encoded a bucket: ``nbytes`` of payload are ready to travel."""

    group: int
    epoch: int
    bucket: int
    nbytes: int


class Verdict(NamedTuple):
    """Every rank has encoded a bucket; ``sizes`` are the payloads' bytes by rank."""

    group: int
    epoch: int
    bucket: int
    sizes: tuple[int, ...]


def pack_vote(vote: Vote) -> bytes:
    """Encode a vote."""
    return _VOTE.pack(VOTE, *vote)


def unpack_vote(message: bytes) -> Vote:
    """Decode a vote."""
    return Vote(*_VOTE.unpack(message)[1:])


def pack_go(verdict: Verdict) -> bytes:
    """Encode a verdict."""
    head = _GO.pack(GO, verdict.group, verdict.epoch, verdict.bucket)
    return head + struct.pack(f"<{len(verdict.sizes)}Q", *verdict.sizes)


def unpack_go(message: bytes) -> Verdict:
    """Decode a verdict."""
    head = _GO.unpack_from(message)[1:]
    count = (len(message) - _GO.size) // 8
    sizes = struct.unpack_from(f"<{count}Q", message, _GO.size)
    return Verdict(head[0], head[1], head[2], sizes)


def pack_hits(ids: list[int]) -> bytes:
    """Encode cached request ids as a bit vector."""
    bits = 0
    for i in ids:
        bits |= 1 << i
    return HITS + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_hits(message: bytes) -> list[int]:
    """Decode cached request ids, ascending."""
    bits = int.from_bytes(message[1:], "little")
    ids = []
    while bits:
        low = bits & -bits
        ids.append(low.bit_length() - 1)
        bits ^= low
    return ids


def pack_execute_hits(group: int, ids: list[int]) -> bytes:
    """Encode cached requests that every rank is ready for, in the order to run them."""
    return EXECUTE_HITS + struct.pack(f"<{len(ids) + 1}I", group, *ids)


def unpack_execute_hits(message: bytes) -> tuple[int, list[int]]:
    """Decode (group, ids)."""
    group, *ids = struct.unpack(f"<{(len(message) - 1) // 4}I", message[1:])
    return group, ids
