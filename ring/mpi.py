"""Ranks of an MPI job, through mpi4py.

Reductions are MPI's own wherever MPI has them, because it knows the machine's hierarchy; 16-bit
floats, and minima and maxima of floats (where MPI says nothing about NaN and signed zeros), are
combined in rank order by ``ringlet.ring.halves``. What is only moved travels as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import FLOATS, Array, dtype_name
from ringlet.ring.errors import PeerLost, RingError, unavailable
from ringlet.ring.halves import (
    HALVES,
    Scratch,
    combine,
    combine_everywhere,
    divided,
    exchange_shards,
    flat,
    same,
    settle_nans,
    ufunc_of,
)

REMEDY = "Install one: pip install 'ringlet[mpi]'"


class MpiCommunicator(Communicator):
    """The ranks of ``comm``; None stands for a duplicate of COMM_WORLD, freed by ``close``.

    MPI is asked for thread level MULTIPLE, unless it already runs. Note that most MPI libraries end
    the whole job when a rank dies: no Python code learns of it.
    """

    name = "mpi"

    def __init__(self, comm: Any = None) -> None:
        self._mpi = _import_mpi()
        self._owned = comm is None
        self._comm = self._mpi.COMM_WORLD.Dup() if comm is None else comm
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())
        self._scratch = Scratch()

    def allreduce(
        self, buffer: Array, op: ReduceOp = ReduceOp.SUM, dtype: str | None = None
    ) -> None:
        """Combine in place; by MPI, or shard by shard in rank order where MPI cannot."""
        flat(buffer)
        ufunc_of(op)
        name = dtype_name(buffer, dtype)
        comm = self._open()
        if buffer.size == 0 or self.size == 1:
            return
        if not _native(name, op):
            combine_everywhere(self, buffer, op, name, self._scratch)
            return
        values, mpi_op = self._operands(buffer, op)
        self._call(comm.Allreduce, self._mpi.IN_PLACE, values, mpi_op)
        settle_nans(buffer)  # ranks may have added the same two NaNs in either order

    def reduce_scatter(
        self,
        send: Array,
        receive: Array,
        counts: Sequence[int],
        op: ReduceOp = ReduceOp.SUM,
        dtype: str | None = None,
    ) -> None:
        """Combine; rank r receives the r-th piece."""
        flat(send, receive)
        ufunc_of(op)
        name = dtype_name(send, dtype)
        pieces = divided(counts, self.size, send.size)
        same(pieces[self.rank], receive, "receive")
        comm = self._open()
        if not _native(name, op):
            combine(exchange_shards(self, send, pieces, self._scratch), [receive], op, name)
            return
        values, mpi_op = self._operands(send, op)
        own, _ = self._operands(receive, op)
        self._call(comm.Reduce_scatter, values, own, pieces, mpi_op)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int] | None = None) -> None:
        """Concatenate every rank's ``send``, as bytes."""
        flat(send, receive)
        pieces = divided(counts, self.size, receive.size)
        same(pieces[self.rank], send, "send")
        comm, byte = self._open(), self._mpi.BYTE
        own = [send, send.nbytes, byte]
        if len(set(pieces)) == 1:
            self._call(comm.Allgather, own, [receive, send.nbytes, byte])
        else:
            self._call(comm.Allgatherv, own, self._pieces(receive, pieces))

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
        outgoing, incoming = self._pieces(send, sends), self._pieces(receive, receives)
        self._call(self._open().Alltoallv, outgoing, incoming)

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Copy the buffer of rank ``root``."""
        flat(buffer)
        if not 0 <= root < self.size:
            raise ValueError(f"root must be a rank below {self.size}, not {root}")
        self._call(self._open().Bcast, [buffer, buffer.nbytes, self._mpi.BYTE], root)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._call(self._open().Barrier)

    def close(self) -> None:
        """Free the duplicate of COMM_WORLD; a communicator that was handed in is left alone."""
        comm, self._comm = self._comm, None
        if comm is not None and self._owned and not self._mpi.Is_finalized():
            try:
                comm.Free()
            except self._mpi.Exception:
                return  # it is broken; there is nothing left to free

    def _open(self) -> Any:
        if self._comm is None:
            raise RingError("this communicator is closed")
        return self._comm

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except self._mpi.Exception as error:
            lost = {getattr(self._mpi, n, None) for n in ("ERR_PROC_ABORTED", "ERR_PROC_FAILED")}
            kind = PeerLost if error.Get_error_class() in lost else RingError
            text = error.Get_error_string()
            raise kind(f"MPI {function.__name__} failed on rank {self.rank}: {text}") from error

    def _operands(self, array: Array, op: ReduceOp) -> tuple[list[Any], Any]:
        mpi = self._mpi
        if array.dtype == np.bool_:  # MPI does not add booleans: any is a maximum, all a minimum
            any_of = op in (ReduceOp.SUM, ReduceOp.MAX)
            return [array.view(np.uint8), array.size, mpi.UINT8_T], mpi.MAX if any_of else mpi.MIN
        names = {"float32": "FLOAT", "float64": "DOUBLE"}
        kind = getattr(mpi, names.get(array.dtype.name, f"{array.dtype.name.upper()}_T"))
        return [array, array.size, kind], getattr(mpi, _OPS[op])

    def _pieces(self, array: Array, counts: Sequence[int]) -> list[Any]:
        nbytes = [n * array.itemsize for n in counts]
        starts = [0, *accumulate(nbytes)][:-1]
        return [array, (nbytes, starts), self._mpi.BYTE]


_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.PRODUCT: "PROD",
}


def _native(name: str, op: ReduceOp) -> bool:
    if name in FLOATS:
        return name not in HALVES and op in (ReduceOp.SUM, ReduceOp.PRODUCT)
    return True


def _import_mpi() -> Any:
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        from mpi4py import MPI
    except ImportError as error:
        raise unavailable("mpi", str(error), REMEDY) from error
    except RuntimeError as error:  # mpi4py is there, but finds no MPI library
        raise unavailable("mpi", str(error), REMEDY) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        remedy = "Import ringlet before MPI is initialised, so that it can ask for more."
        raise unavailable("mpi", "MPI runs at a thread level that allows one thread only", remedy)
    return MPI
