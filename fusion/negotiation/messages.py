"""Control messages between engines and their coordinator: one byte of kind, then the body.

Votes and verdicts, which a steady step consists of, are packed; the others are JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringlet.fusion.errors import BrokenElsewhere, LostElsewhere
from ringlet.fusion.requests.request import Request, dumps, loads

# From a rank to the coordinator. A version counts the EXECUTE messages that the rank has heard.
DECLARE = b"D"  # [process set, group name, [request, ...], why this rank cannot, or nothing]
REQUEST = b"R"  # [version, [request, ...]]
HITS = b"H"  # process set, version, then the set of cached request ids as a bit vector
SERIES = b"N"  # process set, version, runs of calls without names: see ``pack_series``
VOTE = b"V"  # Vote
FAILED = b"F"  # Failure: this rank cannot go on with a group's step
DIGESTS = b"U"  # [process set, [[batch, place in it, tensor's name, digest], ...]]
RELEASE = b"B"  # [process set, group, or batch that failed]: this rank has no use for it any more
JOIN = b"J"  # process set: this rank has no more data
ADD_SET = b"A"  # [rank, ...]: make a process set of these
REMOVE_SET = b"M"  # process set
CHECK = b"C"  # look for stalls; from rank 0
ANNOUNCE = b"O"  # [action, argument]: something that all ranks are to do at the same point
BROKEN = b"X"  # text: this rank's engine is broken
SEVERED = b"Z"  # [[rank, ...], text]: a collective failed; to these there is no connection any more
GOODBYE = b"S"  # text: this rank shuts down, because of an exception if there is a text

# From the coordinator to every rank; BROKEN is passed on.
DECLARED = b"d"  # [process set, group name, group, [name, ...]]
REFUSED = b"r"  # Refusal
EXECUTE = b"E"  # [process set, batch, [Item, ...]]
STEP_FAILED = b"f"  # FailedStep
EXECUTE_HITS = b"h"  # process set, batch, then the set of cached request ids as a bit vector
EXECUTE_SERIES = b"n"  # [process set, batch, [[prefix, first number, stop], ...]]
GO = b"G"  # Verdict, then the payloads' bytes by rank
WANTED = b"w"  # Vote of a rank that has data: those that joined vote with zeros
JOINED = b"j"  # [process set, rank that joined last, text if not all can, [rank that left, ...]]
SET = b"s"  # SetChange
ANNOUNCED = b"o"  # [action, argument, whether all ranks are still there]
FORGET = b"b"  # group, which all ranks have released
STALLED = b"T"  # text: a warning for rank 0's log
LOST = b"L"  # [[rank, ...], text]: these are gone, or have no connection to each other
GONE = b"g"  # [rank, text]: its goodbye has been heard, and nothing after this needs it

CALLS = 1 << 16  # without names, that a rank asks for in one message

_VOTE = struct.Struct("<cQIIQIQQQI??")
_GO = struct.Struct("<cQIII")
_HITS = struct.Struct("<cIQ")
_EXECUTE = struct.Struct("<cIQ")


class Vote(NamedTuple):
    """A rank has encoded a bucket: ``nbytes`` of payload are ready to travel.

    ``turn`` counts the group's steps, ``plan`` is a hash of what ranks must have in common to
    exchange the bucket, ``digest`` one of what the bucket's last exchange gave (0: nothing).
    ``buckets`` is how many of the step's ranks vote on. The exchange ends the bucket if it is
    ``final``; a rank that joined votes with zeros, ``absent``.
    """

    group: int
    epoch: int
    bucket: int
    nbytes: int
    process_set: int = 0
    turn: int = 0
    plan: int = 0
    digest: int = 0
    buckets: int = 1
    final: bool = True
    absent: bool = False


class Verdict(NamedTuple):
    """Every rank has encoded a bucket; ``sizes`` are the payloads' bytes by rank.

    ``contributors`` is how many ranks have values of their own in it.
    """

    group: int
    epoch: int
    bucket: int
    contributors: int
    sizes: tuple[int, ...]


class Failure(NamedTuple):
    """One rank cannot go on with a group's step ``turn``; ``epoch`` counts its failures so far.

    ``kind`` says which error the others raise (``FailedStep.kind``). ``biggest`` is of "memory":
    the bytes, before compression, of the largest bucket of that step.
    """

    process_set: int
    group: int
    epoch: int
    turn: int
    kind: str
    text: str
    biggest: int = 0


KINDS = ("compression", "exchange", "abandoned", "memory", "mismatch", "gone")


class FailedStep(NamedTuple):
    """A group's step ``turn`` failed on all ranks. ``gone`` are ranks that left, if that is why.

    Kinds: "compression", "exchange" (given up by all ranks together), "abandoned", "memory",
    "mismatch" (ranks are not in the same step, or plan it differently: no later step can do better)
    and "gone". ``biggest`` is the failure's: ranks that are a step behind have another plan.
    """

    group: int
    epoch: int
    turn: int
    kind: str
    text: str
    biggest: int = 0
    gone: Sequence[int] = ()


class Item(NamedTuple):
    """One request that is executed.

    ``cache_id`` is -1 where it has none. ``sizes`` are by rank, where they differ. ``request`` is
    for ranks that joined, null where all have asked. ``contributors`` is how many have.
    """

    name: str
    cache_id: int
    sizes: Sequence[Any]
    request: list[Any] | None
    contributors: int


class Refusal(NamedTuple):
    """What ``ranks`` have asked for is not done, and why.

    ``names`` are those of requests, or the name of a group. ``gone`` are the ranks that left, if
    that is why. Other ranks may have asked for the same since: that is another request.
    """

    process_set: int
    names: Sequence[str] | str
    ranks: Sequence[int]
    text: str
    gone: Sequence[int] = ()


class Run(NamedTuple):
    """Calls ``first`` to ``stop``, exclusive, of a series: they differ in nothing but the number.

    ``request`` is their prototype.
    """

    first: int
    stop: int
    request: Request


class SetChange(NamedTuple):
    """The answer to calls for a process set, for the ranks that are ``called``.

    Made; removed where ``ranks`` is empty; not done if there is a ``text``, and then ``gone`` are
    the ranks that left, if that is why.
    """

    number: int
    ranks: Sequence[int]
    text: str
    called: Sequence[int]
    gone: Sequence[int] = ()


def pack_vote(vote: Vote, kind: bytes = VOTE) -> bytes:
    """Encode a vote."""
    return _VOTE.pack(kind, *vote)


def unpack_vote(message: bytes) -> Vote:
    """Decode a vote."""
    return Vote(*_VOTE.unpack(message)[1:])


def pack_go(verdict: Verdict) -> bytes:
    """Encode a verdict."""
    head = _GO.pack(GO, *verdict[:4])
    return head + struct.pack(f"<{len(verdict.sizes)}Q", *verdict.sizes)


def unpack_go(message: bytes) -> Verdict:
    """Decode a verdict."""
    _, group, epoch, bucket, contributors = _GO.unpack_from(message)
    count = (len(message) - _GO.size) // 8
    sizes = struct.unpack_from(f"<{count}Q", message, _GO.size)
    return Verdict(group, epoch, bucket, contributors, sizes)


def pack_series(process_set: int, version: int, runs: Sequence[Run]) -> bytes:
    """Encode runs of calls without names: their prototypes' text stands behind, a line each."""
    places: dict[int, int] = {}
    lines = [b""]
    flat: list[int] = []
    for first, stop, request in runs:
        place = places.setdefault(id(request), len(places))
        if place == len(lines) - 1:
            lines.append(request.text.encode())
        flat += (place, first, stop - first)
    lines[0] = SERIES + dumps([process_set, version, flat])
    return b"\n".join(lines)


def unpack_series(message: bytes, known: Callable[[bytes], Request]) -> tuple[int, int, list[Run]]:
    """Decode (process set, version, runs). ``known(text)`` gives the request of a prototype.

    Raises ValueError for runs of no calls, or of more than CALLS together, which nobody packs.
    """
    head, *texts = message[1:].split(b"\n")
    process_set, version, flat = loads(head)
    requests = list(map(known, texts))
    if min(flat[2::3], default=1) < 1 or sum(flat[2::3]) > CALLS:
        raise ValueError(
            f"runs of {flat[2::3]} calls; they are of one at least, and {CALLS} in all"
        )
    each = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return process_set, version, [Run(n, n + count, requests[i]) for i, n, count in each]


def ids_of(bits: int) -> list[int]:
    """Return which bits are set, ascending."""
    ids = []
    for at, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        if byte:
            ids += [8 * at + i for i in range(8) if byte >> i & 1]
    return ids


def pack_hits(process_set: int, version: int, bits: int) -> bytes:
    """Encode which cached requests a rank asks for."""
    return _HITS.pack(HITS, process_set, version) + _vector(bits)


def unpack_hits(message: bytes) -> tuple[int, int, int]:
    """Decode (process set, version, bits)."""
    _, process_set, version = _HITS.unpack_from(message)
    return process_set, version, int.from_bytes(message[_HITS.size :], "little")


def pack_execute_hits(process_set: int, batch: int, bits: int) -> bytes:
    """Encode cached requests that every rank has asked for, to be run in ascending order."""
    return _EXECUTE.pack(EXECUTE_HITS, process_set, batch) + _vector(bits)


def unpack_execute_hits(message: bytes) -> tuple[int, int, int]:
    """Decode (process set, batch, bits)."""
    _, process_set, batch = _EXECUTE.unpack_from(message)
    return process_set, batch, int.from_bytes(message[_EXECUTE.size :], "little")


def unpack_end(message: bytes) -> LostElsewhere | BrokenElsewhere | None:
    """Return what a LOST or BROKEN message says, with which engines end; None for any other."""
    if message[:1] == LOST:
        ranks, text = loads(message[1:])
        return LostElsewhere(text, ranks)
    return BrokenElsewhere(loads(message[1:])) if message[:1] == BROKEN else None


def unpack_gone(message: bytes) -> tuple[int, str] | None:
    """Return which rank has left and why, of a GONE message; None for any other."""
    if message[:1] != GONE:
        return None
    rank, text = loads(message[1:])
    return rank, text


def _vector(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
