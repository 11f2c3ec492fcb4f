"""Control messages between engines and their coordinator: one byte of kind, then the body.

Votes and verdicts, which a steady step consists of, are packed; the others are JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

# From a rank to the coordinator.
DECLARE = b"D"  # [process set, group name, [request, ...]]
REQUEST = b"R"  # [request, ...]
HITS = b"H"  # process set, then the set of cached request ids as a bit vector
VOTE = b"V"  # Vote
FAILED = b"F"  # [process set, group, epoch, text]: this rank cannot go on with a group's step
JOIN = b"J"  # process set: this rank has no more data
ADD_SET = b"A"  # [rank, ...]: make a process set of these
REMOVE_SET = b"M"  # process set
CHECK = b"C"  # look for stalls; from rank 0
ANNOUNCE = b"O"  # [action, argument]: something that all ranks are to do at the same point
BROKEN = b"X"  # text: this rank's engine is broken
GOODBYE = b"S"  # this rank shuts down

# From the coordinator to every rank; BROKEN is passed on, FAILED with the ranks that left, if any.
DECLARED = b"d"  # [process set, group name, group, [name, ...]]
REFUSED = b"r"  # [process set, [request name, ...] or group name, text, [rank that left, ...]]
EXECUTE = b"E"  # [process set, batch, [[name, cache id, sizes by rank, request or null], ...]]
EXECUTE_HITS = b"h"  # process set, batch, then the set of cached request ids as a bit vector
GO = b"G"  # Verdict, then the payloads' bytes by rank
WANTED = b"w"  # Vote of a rank that has data: those that joined vote with zeros
JOINED = b"j"  # [process set, rank that joined last, text if not all can, [rank that left, ...]]
SET = b"s"  # [process set, [rank, ...], text]: made; removed if without ranks; not done if text
ANNOUNCED = b"o"  # [action, argument, whether all ranks are still there]
STALLED = b"T"  # text: a warning for rank 0's log
LOST = b"L"  # [rank, text]
GONE = b"g"  # rank: its goodbye has been heard, and nothing after this needs it

_VOTE = struct.Struct("<cIIIQI")
_GO = struct.Struct("<cIII")
_HITS = struct.Struct("<cI")
_EXECUTE = struct.Struct("<cII")


class Vote(NamedTuple):
    """A rank has encoded a bucket: ``nbytes`` of payload are ready to travel."""

    group: int
    epoch: int
    bucket: int
    nbytes: int
    process_set: int = 0


class Verdict(NamedTuple):
    """Every rank has encoded a bucket; ``sizes`` are the payloads' bytes by rank."""

    group: int
    epoch: int
    bucket: int
    sizes: tuple[int, ...]


def pack_vote(vote: Vote, kind: bytes = VOTE) -> bytes:
    """Encode a vote."""
    return _VOTE.pack(kind, *vote)


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


def bits_of(ids: Iterable[int]) -> int:
    """Return a set of small numbers as the bits of one integer."""
    bits = 0
    for i in ids:
        bits |= 1 << i
    return bits


def ids_of(bits: int) -> list[int]:
    """Return which bits are set, ascending."""
    ids = []
    for at, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        if byte:
            ids += [8 * at + i for i in range(8) if byte >> i & 1]
    return ids


def pack_hits(process_set: int, bits: int) -> bytes:
    """Encode which cached requests a rank asks for."""
    return _HITS.pack(HITS, process_set) + _vector(bits)


def unpack_hits(message: bytes) -> tuple[int, int]:
    """Decode (process set, bits)."""
    return _HITS.unpack_from(message)[1], int.from_bytes(message[_HITS.size :], "little")


def pack_execute_hits(process_set: int, batch: int, bits: int) -> bytes:
    """Encode cached requests that every rank is ready for, to be run in ascending order."""
    return _EXECUTE.pack(EXECUTE_HITS, process_set, batch) + _vector(bits)


def unpack_execute_hits(message: bytes) -> tuple[int, int, int]:
    """Decode (process set, batch, bits)."""
    _, process_set, batch = _EXECUTE.unpack_from(message)
    return process_set, batch, int.from_bytes(message[_EXECUTE.size :], "little")


def _vector(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
