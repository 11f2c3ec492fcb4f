"""Collectives over a torch.distributed process group for the CPU, ours or the user's.

gloo, which is what such groups mostly are, is fast at some things only. Its all-gather and
all-to-all let all ranks send to one at once, which takes 1.4 times the wire's time on a network of
1 Gbit/s, and a small allreduce takes three times as long as sends and receives between all pairs.
So large sums go to gloo's ring; the rest is made of sends and receives, and what gloo cannot
reduce, or is small, is combined here in rank order.

A message of gloo's takes two journeys, as the receiver says first that it is ready, and its ring of
n ranks takes 2 (n - 1) messages one after the other. Between sites that is most of a step. Where
messages take long, sums are made here, in one message or two: ranks send to each other directly,
and all at once, as a connection takes several journeys until it fills its share of the line. Only
where some ranks are near each other do large sums go around the ring. Over a line between two sites
it sends each sum less than twice; ranks that send directly do so once for each rank of a site.

What is known to come later, such as whether an exchange went well, can be received before its turn
(``expect``): it takes one journey.

gloo ends the process when ranks disagree about a length: agree before you call. It does not tell
who waits for a message that had begun to arrive when its connection ended. That ends here for
gloo's own collectives; for sends and receives whoever waits has to look at ``severed``.
"""

from __future__ import annotations

import ctypes
import traceback
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np

from ringlet.ring.communicator import FAR, Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import PeerLost, unavailable
from ringlet.ring.interrupt import held
from ringlet.ring.rank_order import Scratch, combine, combine_everywhere, exchange_shards

TAG = 0x52  # of our sends, so that they are no answer to the user's receives; siblings count on
EXPECTED = 1 << 10  # added to the tag of what is received before its turn
SMALL = 1 << 15  # bytes a rank receives up to which gathering everything beats gloo's ring
WINDOW = 1 << 20  # bytes under way at once
LOOK = timedelta(seconds=0.5)  # between two looks whether the connections still stand
TURN = 1 << 18  # bytes that one collective sends before another one's turn, between hosts
PIECE = 1 << 24  # bytes of a message, which has to arrive within gloo's time-out
FAR_SMALL = 1 << 20  # bytes up to which the number of messages matters most even where some ranks
# are near: not by how much, or runs would differ in rounding
FAR_BYTES = 12_500_000  # a second, as lines between sites carry them
BOTH = (ReduceOp.SUM, ReduceOp.PRODUCT)  # do not depend on the sign an integer is read with
ALL = (*BOTH, ReduceOp.MIN, ReduceOp.MAX)
# What gloo reduces, as which type, and for which operations. Its minima of floats lose NaNs.
NATIVE: dict[str, tuple[str, tuple[ReduceOp, ...]]] = {
    "float16": ("float16", (ReduceOp.SUM,)),
    "bfloat16": ("int16", (ReduceOp.SUM,)),
    "float32": ("float32", BOTH),
    "float64": ("float64", BOTH),
    "int8": ("int8", ALL),
    "uint8": ("uint8", ALL),
    "int32": ("int32", ALL),
    "int64": ("int64", ALL),
    "uint32": ("int32", BOTH),
    "uint64": ("int64", BOTH),
}


class ProcessGroupCommunicator(Communicator):
    """What communicators that speak through a process group have in common.

    ``_groups`` holds the group; it is empty when there is one rank, and after ``close``.
    """

    def __init__(self, rank: int, size: int, origin: Sequence[int] | None) -> None:
        super().__init__(rank, size, origin)
        self._torch, self._dist = import_torch(self.name)
        self._groups: list[Any] = []
        self._scratch = Scratch()
        self._tag = TAG
        self._number = 0  # among siblings
        # Which of them makes gloo's own collectives. These are told apart by how many there were,
        # and of two threads one may be first on one rank and second on another.
        self._counting = 0
        self._spread = False  # whether every rank is known to be on a host of its own
        # Seconds to the nearest and to the farthest rank, if known; the same on all ranks.
        self._nearest = self._delay = 0.0

    @abstractmethod
    def _release(self) -> None:
        """Let go of the group; idempotent."""

    def _allreduce(self, buffer: Array, op: ReduceOp, name: str) -> None:
        # Small buffers are combined by all ranks at once, large ones around gloo's ring.
        if buffer.size == 0:
            return
        if op in BOTH and buffer.nbytes * self.size <= self.gathered:
            pieces = self._scratch.take(buffer.size * self.size, buffer.dtype)
            self._allgather(buffer, pieces, [buffer.size] * self.size)
            combine(np.split(pieces, self.size), [buffer], op, name)
            return
        direct = self.far and buffer.nbytes <= FAR_SMALL
        if direct or self._number != self._counting or not self.reduces(op, name):
            combine_everywhere(self, buffer, op, name, self._scratch)
            return
        options = self._dist.AllreduceOptions()
        options.reduceOp = getattr(self._dist.ReduceOp, op.name)
        values = self._torch.from_numpy(buffer.view(NATIVE[name][0]))
        if name == "bfloat16":
            values = values.view(self._torch.bfloat16)
        self._wait("allreduce", lambda group: self._finish(group.allreduce([values], options)))

    def reduces(self, op: ReduceOp, dtype: str) -> bool:
        """Whether gloo knows the dtype and the operation, and its ring is the fastest way.

        Between hosts that includes sums of float16, rounded at every hop: adding them takes less
        time than the wire, which a ring fills better. Those of bfloat16 would lose too much by it;
        of two ranks alone they are rounded once here as well.
        """
        if self.all_far or (dtype == "float16" and not self._spread):
            return False
        if dtype == "bfloat16" and self.size != 2:
            return False
        return op in NATIVE.get(dtype, ("", ()))[1]

    def reduce_on(self, number: int) -> None:
        """Let gloo's own allreduce be that of sibling ``number``."""
        self._counting = number

    @property
    def far(self) -> bool:
        """Whether messages are known to take so long that their number matters most."""
        return self._delay >= FAR

    @property
    def gathered(self) -> int:
        """Bytes over all ranks up to which they are gathered to be summed.

        Far away a second message takes as long as it saves where these are so many.
        """
        return max(SMALL, int(2 * self._delay * FAR_BYTES)) if self.far else SMALL

    @property
    def all_far(self) -> bool:
        """Whether messages take that long between any two ranks."""
        return self._nearest >= FAR

    def sums_in_float32(self, dtype: str) -> bool:
        """Whether this has to sum ``dtype`` itself."""
        return self.size == 2 or not self.reduces(ReduceOp.SUM, dtype)  # of two: rounded once

    def _reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        combine(exchange_shards(self, send, counts, self._scratch), [receive], op, name)

    def _allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        places = _places(counts, receive.itemsize)
        outgoing, incoming = self._bytes(send), self._bytes(receive)
        pieces = [incoming[place] for place in places]
        receive.view(np.uint8)[places[self.rank]] = send.view(np.uint8)
        if receive.nbytes <= WINDOW or self.far:
            self._wait(
                "allgather", lambda group: self._trade(group, [outgoing] * self.size, pieces)
            )
            return
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size

        longest = max(map(len, pieces))
        most = TURN if self._spread else max(1, longest)

        def pass_on(group: Any) -> None:
            for step in range(self.size - 1):
                gone, coming = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
                for start in range(0, longest, most):
                    part = slice(start, start + most)
                    send, receive = pieces[gone][part], pieces[coming][part]
                    works = self._receive(group, left, receive)
                    _complete(works + self._send(group, right, send))

        self._wait("allgather", pass_on)

    def _expect(self, receive: Array) -> Callable[[Array], None]:
        if not self.far or not receive.size:
            return super()._expect(receive)
        pieces = self._bytes(receive).split(receive.nbytes // self.size)
        others = [rank for rank in range(self.size) if rank != self.rank]
        works: list[Any] = []

        def prepare(group: Any) -> None:
            works.extend(group.recv([pieces[rank]], rank, self._tag + EXPECTED) for rank in others)

        def gather(send: Array) -> None:
            own = self._bytes(send)
            pieces[self.rank].copy_(own)

            def trade(group: Any) -> None:
                works.extend(group.send([own], rank, self._tag + EXPECTED) for rank in others)
                _complete(works)

            self._wait("allgather", trade)

        self._wait("allgather", prepare)
        return gather

    def _alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        sent, received = (
            _places(send_counts, send.itemsize),
            _places(receive_counts, receive.itemsize),
        )
        own, here = sent[self.rank], received[self.rank]
        receive.view(np.uint8)[here] = send.view(np.uint8)[own]
        outgoing, incoming = self._bytes(send), self._bytes(receive)
        sends, receives = [outgoing[p] for p in sent], [incoming[p] for p in received]
        self._wait("alltoall", lambda group: self._trade(group, sends, receives))

    def _trade(self, group: Any, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        """Send and receive one byte tensor to and from every other rank.

        Ranks meet in shifts, each with one partner in either direction: many senders to one
        receiver at once lose packets. Shifts that are small together are not waited for, and none
        is where messages take long.
        """
        longest = max(map(len, (*sends, *receives)))
        rank, size = self.rank, self.size
        shifts = [((rank + n) % size, (rank - n) % size) for n in range(1, size)]  # to, from
        works: list[Any] = []
        if self.far:  # who is far away hears at once that this rank is ready for all
            for _, source in shifts:
                works += self._receive(group, source, receives[source])
            for to, _ in shifts:
                works += self._send(group, to, sends[to])
            _complete(works)
            return
        most, window = (TURN, TURN) if self._spread else (max(1, longest), WINDOW)
        waiting = 0
        for start, (to, source) in product(range(0, longest, most), shifts):
            part = slice(start, start + most)
            send, receive = sends[to][part], receives[source][part]
            works += self._receive(group, source, receive) + self._send(group, to, send)
            waiting += len(send) + len(receive)
            if waiting > window:
                _complete(works)
                waiting = 0
        _complete(works)

    def _receive(self, group: Any, source: int, piece: Any) -> list[Any]:
        """Start to receive what is not empty, in pieces; both ends know which these are."""
        pieces = piece.split(PIECE) if len(piece) else ()
        return [group.recv([part], source, self._tag) for part in pieces]

    def _send(self, group: Any, to: int, piece: Any) -> list[Any]:
        pieces = piece.split(PIECE) if len(piece) else ()
        return [group.send([part], to, self._tag) for part in pieces]

    def _broadcast(self, buffer: Array, root: int) -> None:
        if buffer.size == 0:
            return
        options = self._dist.BroadcastOptions()
        options.rootRank = root
        values = self._bytes(buffer)
        self._wait("broadcast", lambda group: self._finish(group.broadcast([values], options)))

    def _barrier(self) -> None:
        # An all-to-all of one byte is faster than gloo's own.
        token, ones = np.zeros(self.size, np.uint8), [1] * self.size
        self._alltoall(token, np.empty_like(token), ones, ones)

    def _close(self) -> None:
        self._release()

    def _wait(self, what: str, run: Callable[[Any], Any]) -> None:
        # gloo's threads must end before the interpreter does: one that then frees a tensor takes
        # the GIL and aborts the process. So no exception may keep the group alive in its frames.
        try:
            run(next(iter(self._groups)))
        except StopIteration:  # a sibling has let go of it
            text = f"{self.name} {what}: another call lost the connection to a rank"
            raise PeerLost(text) from None
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)
            reason = str(error).strip().split("\n")[0]
            text = f"{self.name} {what} failed on rank {self.origin[self.rank]}: {reason}"
            self._error = PeerLost(text, severed=self.severed())
            if not held():
                self._release()  # ranks that wait for this one learn of it
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        self._usable()

    def _finish(self, work: Any) -> None:
        """Wait for a collective that a thread of gloo makes, unless it can never end."""
        severed = 0
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():  # or was, a moment after the time had passed
                    work.wait()
                    return
                severed += bool(self.severed())
                if severed < 2:  # what gloo does tell of takes a moment
                    continue
            for group in self._groups:  # its end would wait for that thread
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            raise RuntimeError("a connection ended while a message was on its way")

    def _bytes(self, array: Array) -> Any:
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors
        return self._torch.from_numpy(array.view(np.uint8))


def _places(counts: Sequence[int], itemsize: int) -> list[slice]:
    """Return the bytes of each piece in a buffer of consecutive ones."""
    ends = [0, *accumulate(n * itemsize for n in counts)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _complete(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()


def import_torch(transport: str) -> tuple[Any, Any]:
    """Return torch and torch.distributed; TransportUnavailable, for ``transport``, without them."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        remedy = "Install it: pip install 'ringlet[torch]'"
        raise unavailable(transport, str(error), remedy) from error
    if not dist.is_available():
        why = "this torch was built without torch.distributed"
        raise unavailable(transport, why, "Install another build.")
    return torch, dist
