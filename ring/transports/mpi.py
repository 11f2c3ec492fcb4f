"""Ranks of an MPI job, through mpi4py.

Small reductions are MPI's own, because it knows the machine's hierarchy; large ones go around a
ring (``ringlet.ring.transports.mpi_blocks``). 16-bit floats, minima and maxima of floats (where MPI
says nothing about NaN and signed zeros), and short integers where the library's sums of them
saturate, are combined in rank order by ``ringlet.ring.rank_order``. What is only moved travels
as bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import FLOATS, INTEGERS, Array
from ringlet.ring.errors import PeerLost, RingError, unavailable
from ringlet.ring.float16 import HALVES
from ringlet.ring.rank_order import (
    UFUNCS,
    Scratch,
    combine,
    combine_everywhere,
    exchange_shards,
    settle_nans,
)
from ringlet.ring.transports.mpi_blocks import LEAST, Blocks
from ringlet.ring.transports.mpi_segments import take_names_away
from ringlet.ring.transports.mpi_waits import wait_at_rest

_SHORT = ("int8", "uint8", "int16", "uint16")
_FEW = 32  # ranks to each of which this one sends by itself
REMEDY = "Install one: pip install 'ringlet[mpi]'"

# What launchers pass on, and batch systems send before a job's time is over.
_KEPT = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ROOM = 1024  # bytes: more than any system's struct sigaction has


class MpiCommunicator(Communicator):
    """The ranks of a duplicate of ``comm`` (None: of COMM_WORLD), freed by ``close``. Collective.

    MPI is asked for thread level MULTIPLE, unless it already runs. Note that most MPI libraries end
    the whole job when a rank dies: no Python code learns of it.
    """

    name = "mpi"

    def __init__(self, comm: Any = None, *, origin: Sequence[int] | None = None) -> None:
        self._mpi = _import_mpi()
        self._comm = (self._mpi.COMM_WORLD if comm is None else comm).Dup()
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        super().__init__(int(self._comm.Get_rank()), int(self._comm.Get_size()), origin)
        self._types = _types(self._mpi)
        self._ops = {
            ReduceOp.SUM: self._mpi.SUM,
            ReduceOp.MIN: self._mpi.MIN,
            ReduceOp.MAX: self._mpi.MAX,
            ReduceOp.PRODUCT: self._mpi.PROD,
        }
        # Open MPI lets sums of short integers saturate where the processor has AVX (issue 8045).
        self._saturates = "Open MPI" in self._mpi.Get_library_version()
        self._scratch = Scratch()
        self._blocks = Blocks(self._mpi, self._comm)
        if self._mpi.Comm.Compare(self._comm, self._mpi.COMM_WORLD) != self._mpi.UNEQUAL:
            self._call(self._comm.Barrier)  # no rank has yet to find a segment by its name
            take_names_away()

    def sums_in_float32(self, dtype: str) -> bool:
        """Whether this has to sum ``dtype`` itself."""
        return not self._native(dtype, ReduceOp.SUM)

    def _allreduce(self, buffer: Array, op: ReduceOp, name: str) -> None:
        # Shard by shard in rank order where MPI cannot, around a ring where it is slow.
        if buffer.size == 0:
            return
        if not self._native(name, op):
            combine_everywhere(self, buffer, op, name, self._scratch)
            return
        if buffer.nbytes >= LEAST * self.size:
            combined = UFUNCS[op]
            self._call(self._blocks.ring_allreduce, buffer, combined, self._scratch)
            return
        values, mpi_op = self._operands(buffer, op)
        self._call(self._comm.Allreduce, self._mpi.IN_PLACE, values, mpi_op)
        settle_nans(buffer)  # ranks may have added the same two NaNs in either order

    def _reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        if not self._native(name, op):
            combine(exchange_shards(self, send, counts, self._scratch), [receive], op, name)
            return
        values, mpi_op = self._operands(send, op)
        own, _ = self._operands(receive, op)
        self._call(self._comm.Reduce_scatter, values, own, counts, mpi_op)

    def _allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        if max(counts) * receive.itemsize >= LEAST:
            self._call(self._blocks.ring_allgather, send, receive, counts)
            return
        byte = self._mpi.BYTE
        own = [send, send.nbytes, byte]
        if len(set(counts)) == 1:
            self._wait(self._comm.Iallgather, own, [receive, send.nbytes, byte])
        else:
            self._wait(self._comm.Iallgatherv, own, self._pieces(receive, counts))

    def _alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        if self.size <= _FEW:
            self._call(self._blocks.alltoall, send, receive, send_counts, receive_counts)
            return
        outgoing, incoming = self._pieces(send, send_counts), self._pieces(receive, receive_counts)
        self._wait(self._comm.Ialltoallv, outgoing, incoming)

    def _broadcast(self, buffer: Array, root: int) -> None:
        self._wait(self._comm.Ibcast, [buffer, buffer.nbytes, self._mpi.BYTE], root)

    def _barrier(self) -> None:
        self._wait(self._comm.Ibarrier)

    def _subset(self, ranks: list[int]) -> MpiCommunicator | None:
        everybody = self._comm.Get_group()
        group = everybody.Incl(ranks)
        try:
            comm = self._call(self._comm.Create, group)
        finally:
            group.Free()
            everybody.Free()
        if comm == self._mpi.COMM_NULL:
            return None
        try:
            return MpiCommunicator(comm, origin=[self.origin[rank] for rank in ranks])
        finally:
            comm.Free()

    def _close(self) -> None:
        comm, self._comm = self._comm, None
        if not self._mpi.Is_finalized():
            with contextlib.suppress(self._mpi.Exception):  # broken: there is nothing left to free
                comm.Free()

    def _wait(self, function: Callable[..., Any], *args: Any) -> None:
        """Call what only begins an operation, and wait for its end at rest."""
        self._call(function, *args, rest=True)

    def _call(self, function: Callable[..., Any], *args: Any, rest: bool = False) -> Any:
        try:
            made = function(*args)
            return wait_at_rest(made) if rest else made
        except self._mpi.Exception as error:
            lost = {getattr(self._mpi, n, None) for n in ("ERR_PROC_ABORTED", "ERR_PROC_FAILED")}
            kind = PeerLost if error.Get_error_class() in lost else RingError
            text = error.Get_error_string()
            raise kind(
                f"MPI {function.__name__} failed on rank {self.origin[self.rank]}: {text}"
            ) from error

    def _native(self, name: str, op: ReduceOp) -> bool:
        """Whether MPI may reduce arrays of dtype ``name``."""
        if name in FLOATS:
            return name not in HALVES and op in (ReduceOp.SUM, ReduceOp.PRODUCT)
        return not (self._saturates and name in _SHORT and op is ReduceOp.SUM)

    def _operands(self, array: Array, op: ReduceOp) -> tuple[list[Any], Any]:
        if array.dtype == np.bool_:  # MPI does not add booleans: any is a maximum, all a minimum
            any_of = op in (ReduceOp.SUM, ReduceOp.MAX)
            op, array = ReduceOp.MAX if any_of else ReduceOp.MIN, array.view(np.uint8)
        return [array, array.size, self._types[array.dtype]], self._ops[op]

    def _pieces(self, array: Array, counts: Sequence[int]) -> list[Any]:
        nbytes = [n * array.itemsize for n in counts]
        starts = [0, *accumulate(nbytes)][:-1]
        return [array, (nbytes, starts), self._mpi.BYTE]


def _types(mpi: Any) -> dict[np.dtype[Any], Any]:
    """Return the MPI type of every dtype that MPI reduces."""
    named = {"float32": "FLOAT", "float64": "DOUBLE"}
    named |= {name: f"{name.upper()}_T" for name in INTEGERS if name != "bool"}
    return {np.dtype(name): getattr(mpi, constant) for name, constant in named.items()}


def _finalize(mpi: Any) -> None:
    """Do at exit what mpi4py does where it has initialised MPI itself."""
    if not mpi.Is_finalized():
        mpi.Finalize()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back what signals do, at the end, on whichever thread: Python's module needs the main.

    MPICH's libraries take SIGHUP and SIGUSR1 for themselves where a program has not: a rank then
    outlives the terminal that its job was started from.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = {number: ctypes.create_string_buffer(_ROOM) for number in _KEPT}
    for number, action in before.items():
        sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in before.items():
            sigaction(int(number), action, None)


def _import_mpi() -> Any:
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        with _signals_kept():
            from mpi4py import MPI
    except ImportError as error:
        raise unavailable("mpi", str(error), REMEDY) from error
    except RuntimeError as error:  # mpi4py is there, but finds no MPI library
        raise unavailable("mpi", str(error), REMEDY) from error
    if not MPI.Is_initialized():  # the program has told mpi4py not to
        with _signals_kept():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize, MPI)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        remedy = "Import ringlet before MPI is initialised, so that it can ask for more."
        raise unavailable("mpi", "MPI runs at a thread level that allows one thread only", remedy)
    return MPI
