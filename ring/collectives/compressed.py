"""Allreduce for payloads that cannot be summed as they are.

Two ways, both bit-identical on every rank because a rank's own payload goes through the codec like
everybody else's, and because payloads are summed in rank order everywhere:

- all-gather: every rank receives all payloads and sums them itself. Sends (W-1) payloads.
- scatter-reduce with recompression: rank r receives part r of everybody, sums, encodes the sum
  again and all-gathers it. Sends 2(W-1)/W payloads, at the price of a second rounding.

Encoding comes before (``encode``), so that a codec that fails does so before any byte moves. Where
ranks do not vote on what they have encoded, the one that failed sends a ``blank`` instead, which no
rank takes for a payload. Every payload travels with a seal. Ranks tell each other what they found,
and whether they could decode, so that all raise the same error. In a pipeline (``steps``) they do
both at once: where an error is raised, outputs may have been written, or not, on each rank for
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ringlet.ring.collectives.codec import Codec
from ringlet.ring.collectives.seal import SEAL, Fault, inspect, seal
from ringlet.ring.communicator import Communicator
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import ExchangeFailed, ProtocolError
from ringlet.ring.pipeline import Steps, Wire

Allocate = Callable[[int], Array]  # returns so many bytes (uint8)
_MASK = (1 << 64) - 1  # a plan's hash has 64 bits


def new_bytes(nbytes: int) -> Array:
    """Return new memory (uint8) with undefined contents."""
    return np.empty(nbytes, np.uint8)


@dataclass
class Encoded:
    """This rank's payload of one bucket: ``buffer`` (uint8), and the bytes of each part.

    Bytes are those on the wire: every part ends with room for its seal, if it has one.
    """

    buffer: Array
    counts: list[int]
    nbytes: int = field(init=False)  # of all parts together

    def __post_init__(self) -> None:
        self.nbytes = sum(self.counts)


def encode(codec: Codec, allocate: Allocate = new_bytes, room: int = SEAL) -> Encoded:
    """Encode every part, one behind the other and each with ``room`` bytes behind it."""
    codec.prepare()
    parts = range(codec.parts)
    buffer = allocate(sum(map(codec.capacity, parts)) + room * len(parts))
    counts: list[int] = []
    start = 0
    for part in parts:
        counts.append(codec.encode_into(part, buffer[start : buffer.size - room]) + room)
        start += counts[-1]
    return Encoded(buffer[:start], counts)


def blank(codec: Codec, allocate: Allocate = new_bytes) -> Encoded:
    """Return as many bytes as ``encode`` does with a codec whose payloads are of fixed size."""
    counts = [codec.capacity(part) + SEAL for part in range(codec.parts)]
    return Encoded(allocate(sum(counts)), counts)


class Exchange(Protocol):
    """A compressed allreduce: ``start``, what ``rest`` holds, and ``agree`` are collective."""

    sent: int  # bytes that this rank sends
    rest: Sequence[Callable[[], None]]  # collectives between the first and the last

    def start(self) -> None:
        """Move payloads."""

    def reduce(self) -> None:
        """Sum and encode what arrived."""

    def decode(self) -> None:
        """Write the output, unless this rank found a fault."""

    def undecoded(self, error: Exception) -> None:
        """Note that this rank's codec could not decode."""

    def agree(self) -> None:
        """Raise ExchangeFailed on all ranks if any of them found a fault, or could not decode."""


def steps(
    exchange: Exchange, working: Callable[[str, Callable[[], None]], None] = lambda _, work: work()
) -> Steps:
    """Yield the collectives of ``exchange``; ``working(name, call)`` makes the calls between them.

    The last collective raises ExchangeFailed on all ranks if any of them found a fault, or failed.
    """
    yield Wire(exchange.start, exchange.sent)
    working("reduce", exchange.reduce)
    for collective in exchange.rest:
        yield Wire(collective)
    try:
        working("decode", exchange.decode)
    except Exception as error:
        exchange.undecoded(error)
    yield Wire(exchange.agree)


class AllgatherReduce:
    """Gather every rank's payload and decode their sum; ``sizes`` are its bytes by rank.

    ``failure`` is why this rank comes with a ``blank``, if it does. ``siblings`` of ``comm`` make
    its later collectives, so that those of several exchanges can be under way at once. To agree is
    one of its own: its few bytes may queue behind many.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        encoded: Encoded,
        sizes: Sequence[int],
        allocate: Allocate = new_bytes,
        plan: int = 0,
        siblings: Sequence[Communicator] = (),
        failure: Exception | None = None,
    ) -> None:
        if sizes[comm.rank] != encoded.nbytes:
            said = sizes[comm.rank]
            raise ProtocolError(
                f"rank {comm.rank} encoded {encoded.nbytes} bytes, but announced {said}"
            )
        self._comm, self._codec, self._encoded = comm, codec, encoded
        self._sizes = list(sizes)
        self._received = allocate(sum(sizes))
        # It counts the exchange, which can begin now that there is room.
        self._inspector = _Inspector(comm, plan, siblings[0] if siblings else comm, failure)
        self.rest: Sequence[Callable[[], None]] = ()
        self.sent = (comm.size - 1) * encoded.nbytes

    def start(self) -> None:
        """Gather the payloads."""
        self._inspector.expect()
        self._inspector.seal(self._encoded.buffer)
        self._comm.allgather(self._encoded.buffer, self._received, self._sizes)

    def reduce(self) -> None:
        """Look at what arrived."""
        self._inspector.look(split(self._received, self._sizes))

    def decode(self) -> None:
        """Decode the sum of the payloads."""
        if self._inspector.well:
            self._codec.decode_sum_into(0, _opened(self._received, self._sizes))

    def undecoded(self, error: Exception) -> None:
        """Note that this rank's codec could not decode."""
        self._inspector.failed(Fault.UNDECODED, error)

    def agree(self) -> None:
        """Agree that all is well."""
        self._inspector.agree()


class ScatterReduce:
    """Reduce part r on rank r, encode the sum and gather it. Parts are of fixed size.

    ``siblings``, two if any, and ``failure`` are as in ``AllgatherReduce``. Raises ProtocolError,
    before any byte moves, when a part does not fill its capacity: the other ranks count on it. When
    the codec fails to sum, or to decode, all ranks raise ExchangeFailed.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        encoded: Encoded,
        allocate: Allocate = new_bytes,
        plan: int = 0,
        siblings: Sequence[Communicator] = (),
        failure: Exception | None = None,
    ) -> None:
        rank, size = comm.rank, comm.size
        self._sizes = [codec.capacity(part) + SEAL for part in range(size)]
        if encoded.counts != self._sizes:
            raise ProtocolError(
                f"parts have {encoded.counts} bytes, but fixed sizes are {self._sizes}"
            )
        self._comm, self._codec, self._encoded = comm, codec, encoded
        self._later, last = siblings[:2] if siblings else (comm, comm)
        mine = self._sizes[rank]
        self._incoming = [mine] * size
        self._received = allocate(mine * size)
        self._own = allocate(mine)
        self._gathered = allocate(sum(self._sizes))
        self._inspector = _Inspector(comm, plan, last, failure)
        self.rest: Sequence[Callable[[], None]] = (self.finish,)
        self.sent = encoded.nbytes - mine + (size - 1) * mine

    def start(self) -> None:
        """Send part r to rank r."""
        inspector = self._inspector
        inspector.expect()
        for rank, part in enumerate(split(self._encoded.buffer, self._sizes)):
            if rank != self._comm.rank:  # nobody inspects what stays here
                inspector.seal(part)
        self._comm.alltoall(self._encoded.buffer, self._received, self._sizes, self._incoming)

    def reduce(self) -> None:
        """Sum this rank's part and encode the sum; a failure is kept for ``finish``."""
        rank, out = self._comm.rank, self._own[: self._own.size - SEAL]
        self._inspector.look(split(self._received, self._incoming))
        if self._inspector.well:
            try:
                payloads = _opened(self._received, self._incoming)
                used = self._codec.decode_sum_encode(rank, payloads, out)
                if used != out.size:
                    text = f"the sum of part {rank} has {used} bytes, its fixed size is {out.size}"
                    raise ProtocolError(text)
            except Exception as error:
                self._inspector.failed(Fault.FAILED, error)
        seal(self._own, self._inspector.sequence, self._inspector.plan)

    def finish(self) -> None:
        """Gather the sums, and look at them."""
        self._later.allgather(self._own, self._gathered, self._sizes)
        self._inspector.look(split(self._gathered, self._sizes))

    def decode(self) -> None:
        """Decode every rank's part."""
        if self._inspector.well:
            for part, payload in enumerate(_opened(self._gathered, self._sizes)):
                self._codec.decode_into(part, payload)

    def undecoded(self, error: Exception) -> None:
        """Note that this rank's codec could not decode."""
        self._inspector.failed(Fault.UNDECODED, error)

    def agree(self) -> None:
        """Agree that all is well."""
        self._inspector.agree()


def allgather_reduce(
    comm: Communicator,
    codec: Codec,
    encoded: Encoded,
    sizes: Sequence[int],
    allocate: Allocate = new_bytes,
    plan: int = 0,
) -> int:
    """Run one ``AllgatherReduce``; return the bytes this rank sent."""
    return run(AllgatherReduce(comm, codec, encoded, sizes, allocate, plan))


def scatter_reduce(
    comm: Communicator,
    codec: Codec,
    encoded: Encoded,
    allocate: Allocate = new_bytes,
    plan: int = 0,
) -> int:
    """Run one ``ScatterReduce``; return the bytes this rank sent."""
    return run(ScatterReduce(comm, codec, encoded, allocate, plan))


def run(exchange: Exchange) -> int:
    """Take all steps of ``exchange``, and decode when all ranks have found all well.

    Returns the bytes that this rank sent.
    """
    exchange.start()
    exchange.reduce()
    for collective in (*exchange.rest, exchange.agree):
        collective()
    try:
        exchange.decode()
    except Exception as error:
        exchange.undecoded(error)
    exchange.agree()
    return exchange.sent


class _Inspector:
    """Looks at the payloads of one exchange and lets all ranks know what any of them found."""

    def __init__(
        self, comm: Communicator, plan: int, later: Communicator, failure: Exception | None
    ) -> None:
        comm.exchanges += 1
        self.sequence, self.plan = comm.exchanges, plan
        self._comm, self._later = comm, later
        self._finding = 0  # fault and rank in one integer; 0 while there is none
        self.well = True  # whether nothing was found so far, on this rank
        self._error: Exception | None = None  # of this rank's codec
        self._findings = np.empty(comm.size, np.int64)  # of all ranks
        self._gather: Callable[[Array], None] | None = None
        self._spoilt = failure is not None
        if failure is not None:
            self.failed(Fault.UNENCODED, failure)

    def seal(self, message: Array) -> None:
        """Seal a payload of this rank's values, so that a ``blank`` is none of any plan's."""
        seal(message, self.sequence, ~self.plan & _MASK if self._spoilt else self.plan)

    def expect(self) -> None:
        """Let the others send what they find as soon as they know: far away that saves a message.

        Called in one order on all ranks by exchanges that agree on the same communicator.
        """
        self._gather = self._later.expect(self._findings)

    def look(self, messages: Sequence[Array]) -> None:
        """Inspect every other rank's message."""
        for rank, message in enumerate(messages):
            if self.well and rank != self._comm.rank:
                self._note(inspect(message, self.sequence, self.plan), rank)

    def failed(self, fault: Fault, error: Exception) -> None:
        """Note that this rank's codec has raised ``error``."""
        self._error = error
        self._note(fault, self._comm.rank)

    def _note(self, fault: Fault, rank: int) -> None:
        self._finding = fault and fault + len(Fault) * rank
        self.well = not self._finding

    def agree(self) -> None:
        """Raise ExchangeFailed, with one text everywhere, if any rank has found a fault."""
        findings, own = self._findings, np.array([self._finding], np.int64)
        gather, self._gather = self._gather, None
        if gather is None:  # ``run`` agrees twice
            self._later.allgather(own, findings)
        else:
            gather(own)
        if not findings.any():
            return
        origin = self._comm.origin
        cause = findings % len(Fault) == Fault.UNENCODED  # of what other ranks have found
        witness = int(np.flatnonzero(cause if cause.any() else findings)[0])
        rank, fault = divmod(int(findings[witness]), len(Fault))
        if not (fault and 0 <= rank < len(origin)):  # damaged itself, or made up
            text = f"rank {origin[witness]} told of no known fault (exchange {self.sequence})"
            raise ExchangeFailed(text, witness) from self._error
        text = f"rank {origin[witness]} received from rank {origin[rank]} a payload"
        if fault == Fault.FAILED:
            text = f"rank {origin[witness]} made of the payloads it received a sum"
        if fault == Fault.UNDECODED:
            text = f"rank {origin[witness]} received payloads"
        if fault == Fault.UNENCODED:
            text = f"rank {origin[witness]} sent a message"
        text = f"{text} {Fault(fault).text} (exchange {self.sequence})"
        raise ExchangeFailed(text, witness) from self._error


def split(buffer: Array, sizes: Sequence[int]) -> list[Array]:
    """Return consecutive views of flat ``buffer``, of ``sizes`` elements each."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(buffer[start : start + size])
        start += size
    return pieces


def _opened(buffer: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the messages of ``buffer`` without their seals."""
    return [message[: message.size - SEAL] for message in split(buffer, sizes)]
