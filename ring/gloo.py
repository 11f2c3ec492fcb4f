"""Ranks that find each other through a torch.distributed store and talk gloo (TCP).

A process group of our own is used, never torch's default one, which stays the user's. gloo is fast
at some things only: its all-gather is slower than sends and receives between all pairs, and a small
allreduce takes three times as long as one all-to-all. So large sums go to gloo's ring; what gloo
cannot reduce, and what is small, moves as bytes and is combined here in rank order.

gloo ends the process when ranks disagree about a length: agree before you call.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array, dtype_name
from ringlet.ring.errors import PeerLost, RingError, unavailable
from ringlet.ring.halves import (
    Scratch,
    combine,
    combine_everywhere,
    divided,
    exchange_shards,
    flat,
    same,
    ufunc_of,
)

SMALL = 1 << 15  # bytes a rank receives up to which one all-to-all beats every other way
BOTH = (ReduceOp.SUM, ReduceOp.PRODUCT)  # do not depend on the sign an integer is read with
ALL = (*BOTH, ReduceOp.MIN, ReduceOp.MAX)
# What gloo reduces, as which type, and for which operations. Its minima of floats lose NaNs.
NATIVE: dict[str, tuple[str, tuple[ReduceOp, ...]]] = {
    "float32": ("float32", BOTH),
    "float64": ("float64", BOTH),
    "int8": ("int8", ALL),
    "uint8": ("uint8", ALL),
    "int32": ("int32", ALL),
    "int64": ("int64", ALL),
    "uint32": ("int32", BOTH),
    "uint64": ("int64", BOTH),
}


class GlooCommunicator(Communicator):
    """Rank ``rank`` of ``size`` that meet at ``store``, whose keys must not have been used before.

    ``timeout`` (seconds) bounds each call. The network interface is the one GLOO_SOCKET_IFNAME
    names, else the one that has the address ``host``, else the one of this host's name.
    """

    name = "gloo"

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float = 300.0, *, host: str | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be below the size {size}, not {rank}")
        self._torch, self._dist = _import_torch()
        self.rank = rank
        self.size = size
        self._scratch = Scratch()
        self._error: RingError | None = None  # why no further call can be made
        self._groups: list[Any] = []
        if size > 1:
            self._groups.append(self._connect(store, timeout, host))
        # Runs at exit too, when nobody closed.
        self._finalizer = weakref.finalize(self, self._groups.clear)

    def allreduce(
        self, buffer: Array, op: ReduceOp = ReduceOp.SUM, dtype: str | None = None
    ) -> None:
        """Combine in place: small buffers by all ranks at once, large ones around gloo's ring."""
        flat(buffer)
        ufunc_of(op)
        name = dtype_name(buffer, dtype)
        self._check()
        if self.size == 1 or buffer.size == 0:
            return
        if op in BOTH and buffer.nbytes * self.size <= SMALL:
            pieces = self._scratch.take(buffer.size * self.size, buffer.dtype)
            self.allgather(buffer, pieces)
            combine(np.split(pieces, self.size), [buffer], op, name)
            return
        kind, ops = NATIVE.get(name, ("", ()))
        if op not in ops:
            combine_everywhere(self, buffer, op, name, self._scratch)
            return
        options = self._dist.AllreduceOptions()
        options.reduceOp = getattr(self._dist.ReduceOp, op.name)
        values = self._torch.from_numpy(buffer.view(kind))
        self._wait("allreduce", lambda group: group.allreduce([values], options).wait())

    def reduce_scatter(
        self,
        send: Array,
        receive: Array,
        counts: Sequence[int],
        op: ReduceOp = ReduceOp.SUM,
        dtype: str | None = None,
    ) -> None:
        """Exchange the pieces and combine this rank's in rank order."""
        flat(send, receive)
        ufunc_of(op)
        name = dtype_name(send, dtype)
        pieces = divided(counts, self.size, send.size)
        same(pieces[self.rank], receive, "receive")
        combine(exchange_shards(self, send, pieces, self._scratch), [receive], op, name)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int] | None = None) -> None:
        """Send to and receive from every rank directly."""
        flat(send, receive)
        pieces = divided(counts, self.size, receive.size)
        same(pieces[self.rank], send, "send")
        self._check()
        if self.size > 1 and receive.nbytes <= SMALL:
            self.alltoall(np.tile(send, self.size), receive, [send.size] * self.size, pieces)
            return
        starts = [0, *accumulate(pieces)]
        receive[starts[self.rank] : starts[self.rank + 1]] = send
        if self.size == 1:
            return
        outgoing, incoming = self._bytes(send), self._bytes(receive)
        ends = [start * receive.itemsize for start in starts]

        def exchange(group: Any) -> None:
            works = []
            for step in range(1, self.size):
                to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                if pieces[source]:
                    piece = incoming[ends[source] : ends[source + 1]]
                    works.append(group.recv([piece], source, 0))
                if send.size:
                    works.append(group.send([outgoing], to, 0))
            for work in works:
                work.wait()

        self._wait("allgather", exchange)

    def alltoall(
        self,
        send: Array,
        receive: Array,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> None:
        """Exchange pieces, as bytes."""
        flat(send, receive)
        sends = divided(send_counts, self.size, send.size)
        receives = divided(receive_counts, self.size, receive.size)
        self._check()
        if self.size == 1:
            receive[:] = send
            return
        outgoing, incoming = self._bytes(send), self._bytes(receive)
        sent = [n * send.itemsize for n in sends]
        received = [n * receive.itemsize for n in receives]
        options = self._dist.AllToAllOptions()
        self._wait(
            "alltoall",
            lambda group: group.alltoall_base(incoming, outgoing, received, sent, options).wait(),
        )

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Copy the buffer of rank ``root``."""
        flat(buffer)
        if not 0 <= root < self.size:
            raise ValueError(f"root must be a rank below {self.size}, not {root}")
        self._check()
        if self.size == 1 or buffer.size == 0:
            return
        options = self._dist.BroadcastOptions()
        options.rootRank = root
        values = self._bytes(buffer)
        self._wait("broadcast", lambda group: group.broadcast([values], options).wait())

    def barrier(self) -> None:
        """Wait for all ranks: an all-to-all of one byte, which is faster than gloo's own."""
        token = np.zeros(self.size, np.uint8)
        self.alltoall(token, np.empty_like(token))

    def close(self) -> None:
        """Close the connections."""
        self._error = self._error or RingError("this communicator is closed")
        self._finalizer()

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _wait(self, what: str, run: Callable[[Any], Any]) -> None:
        # gloo's threads must end before the interpreter does: one that then frees a tensor takes
        # the GIL and aborts the process. So no exception may keep the group alive in its frames.
        try:
            run(self._groups[0])
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)
            reason = str(error).strip().split("\n")[0]
            self._error = PeerLost(f"gloo {what} failed on rank {self.rank}: {reason}")
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        self._check()

    def _bytes(self, array: Array) -> Any:
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors
        return self._torch.from_numpy(array.view(np.uint8))

    def _connect(self, store: Any, timeout: float, host: str | None) -> Any:
        gloo = self._dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._threads = 1
        interfaces = [i for i in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if i]
        try:
            if interfaces:
                options._devices = [gloo.create_device(interface=name) for name in interfaces]
            elif host:
                options._devices = [gloo.create_device(hostname=host)]
            else:
                options._devices = [gloo.create_default_device()]
        except RuntimeError as error:
            remedy = "Name a network interface in GLOO_SOCKET_IFNAME."
            raise unavailable("gloo", str(error).split("\n")[0], remedy) from error
        prefixed = self._dist.PrefixStore("ringlet-gloo", store)
        try:
            return gloo(prefixed, self.rank, self.size, options)
        except RuntimeError as error:
            text = f"rank {self.rank} of {self.size} could not reach the others over gloo: {error}"
            raise PeerLost(text) from error


def _import_torch() -> tuple[Any, Any]:
    remedy = "Install it: pip install 'ringlet[torch]'"
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise unavailable("gloo", str(error), remedy) from error
    if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
        raise unavailable("gloo", "this torch was built without gloo", "Install another build.")
    return torch, dist
