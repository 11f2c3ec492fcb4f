"""Sparse gradients: rows of a table and their indices, added up, compressed and gathered."""

from __future__ import annotations

from math import prod

import numpy as np

from ringlet.compressors import Compressor, Context, ErrorFeedback, NoCompression, Workspace
from ringlet.compressors.base.contract import encoded
from ringlet.compressors.base.feedback import keep_lost, target_into
from ringlet.compressors.core.context import State
from ringlet.compressors.core.payload import deserialise, serialise, serialised_size
from ringlet.fusion import Handle, Request
from ringlet.fusion.devices.convert import to_float32
from ringlet.fusion.planning.strategy import effective
from ringlet.job.process_sets import InvalidArgument, ProcessSet
from ringlet.job.session import Runtime
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch
from ringlet.shared.arrays import flat, numpy_dtype


def summed(values: Array, indices: Array) -> tuple[Array, Array]:
    """Return rows by ascending index, those of one index added up; always in the same order."""
    if len(indices) < 2 or bool((indices[1:] > indices[:-1]).all()):
        return values, indices
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    rows = values[order]
    if len(starts) < len(order):
        exact = rows if rows.dtype.itemsize > 2 else rows.astype(np.float32)
        rows = np.add.reduceat(exact, starts, axis=0).astype(rows.dtype)
    return rows, ordered[starts]


def check_places(indices: Array, rows: int, name: str) -> None:
    """Raise InvalidArgument, naming the table, unless all ``indices`` are of its ``rows``."""
    if not len(indices):
        return
    least, most = indices.min(), indices.max()
    if least < 0 or most >= rows:
        raise InvalidArgument(
            f"{name!r} has {rows} rows; its gradient has indices from {least} to {most}"
        )


def densified(values: Array, indices: Array, out: Array) -> None:
    """Overwrite ``out``, the whole table, with the rows added up."""
    rows, places = summed(values, indices)
    out[...] = 0
    out[places] = rows


class RowExchange:
    """Sums or averages one table's rows over the ranks, as values and indices.

    Error feedback keeps its residual row by row: what a row lost waits until the row is used again.
    ``name`` tells it from other exchanges; ``variable`` is what mappings of compressors know the
    table by, if they do. Raises InvalidArgument for a compressor that cannot compress rows by
    themselves.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        compressor: Compressor,
        state: State,
        op: ReduceOp,
        process_set: ProcessSet,
        variable: str | None = None,
    ) -> None:
        self._shown = variable or name
        self._routed = variable is not None
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InvalidArgument(
                f"{self._shown!r}: sparse gradients can be summed or averaged only"
            )
        self._runtime, self._name, self._shape, self._dtype = runtime, name, shape, dtype
        self._declared, self._state = compressor, state
        self._op, self._process_set = op, process_set
        self._workspace = Workspace()
        self._handles: list[Handle] = []
        self._before: tuple[Array, Array] | None = None  # rows of the residual, and which
        self._plan(compressor.at(int(state.get("step", 0))))

    def start(self, values: Array, indices: Array) -> None:
        """Add up, compress and submit this rank's rows."""
        rows, places = summed(values, indices)
        check_places(places, self._shape[0], self._shown)
        wide = places.astype(np.int64)
        data = self._encoded(rows, wide)
        number = self._process_set.number()
        dtype = "uint8" if self._packed else self._dtype
        shape = data.shape if self._packed else rows.shape
        requests = [
            Request(f"{self._name}.indices", "allgather", "int64", wide.shape, process_set=number),
            Request(f"{self._name}.values", "allgather", dtype, shape, process_set=number),
        ]
        items = [(requests[0], wide, None, None), (requests[1], flat(data), None, None)]
        self._handles = self._runtime.engine.submit_all(items)

    def wait(self) -> tuple[Array, Array]:
        """Return everybody's rows, added up, and their indices (int64, ascending).

        Where that fails, what they held back before is held back again.
        """
        try:
            indices, gathered = [handle.wait() for handle in self._handles]
        except Mismatch as error:
            self.forget()
            raise Mismatch(f"{error}; {self._as_dense()}") from error
        except Exception:
            self.forget()
            raise
        handles, self._handles, self._before = self._handles, [], None
        if self._packed:
            values = self._decoded(gathered, handles[1].sizes, handles[0].sizes)
        else:
            kind = numpy_dtype(self._dtype)
            typed = gathered.view(kind) if kind.name == "bfloat16" else gathered
            values = typed.reshape(-1, *self._shape[1:])
        rows, places = summed(values, indices)
        if self._op is ReduceOp.AVERAGE:
            rows = (rows / rows.dtype.type(self._process_set.size())).astype(rows.dtype)
        self._state["step"] = step = int(self._state.get("step", 0)) + 1
        if (now := self._declared.at(step)) != self._used:
            self._plan(now)
        return rows, places

    def give_up(self) -> None:
        """Let this step end without result, on this rank: others may wait for its rows."""
        if not self._handles:
            kind = numpy_dtype(self._dtype)
            self.start(np.empty((0, *self._shape[1:]), kind), np.empty(0, np.int64))
        self.forget()

    def forget(self) -> None:
        """Wait for what is under way, ignore how it ends, and keep what it would have sent."""
        for handle in self._handles:
            try:
                handle.wait()
            except Exception:
                continue
        self._handles = []
        if self._before is not None:
            rows, places = self._before
            self._state["rows"][places] = rows
            self._before = None

    # -- inside ---------------------------------------------------------------------------------

    def _as_dense(self) -> str:
        """Return what to do where rows cannot be gathered, as those of ranks that joined."""
        cure = "sparse_as_dense=True" if self._routed else "tf.convert_to_tensor(...) of them"
        return (
            f"rows of {self._shown!r}, a large table, are gathered, and a rank that joined has "
            f"none: pass {cure}, so that they are reduced"
        )

    def _plan(self, compressor: Compressor) -> None:
        self._used = compressor
        size = prod(self._shape)
        self._feedback = compressor if type(compressor) is ErrorFeedback else None
        inner = compressor.wrapped_compressor if self._feedback is not None else compressor  # type: ignore[attr-defined]
        # By the table's size, which all ranks have in common, not by how many rows there are.
        self._inner = effective(inner, self._dtype, size)
        self._packed = not isinstance(self._inner, NoCompression)
        traits = self._inner.traits()
        if self._packed and (traits.stateful or traits.combine == "rounds"):
            what = (
                f"compression={str(compressor)!r} cannot compress rows by themselves, as those of"
            )
            routes = {self._shown: "int8 | ef", "*": str(compressor)}
            raise InvalidArgument(
                f"{what} the sparse gradient of {self._shown!r}: choose another for it, as in "
                f"compression={routes}, or pass sparse_as_dense=True"
                if self._routed
                else f"{what} {self._shown!r}: choose another, such as 'int8', or pass "
                "tf.convert_to_tensor(...) of them"
            )
        if self._feedback is not None and self._feedback.store is not None:
            raise InvalidArgument(
                f"compression={str(compressor)!r}: the rows of the sparse gradient {self._name!r} "
                f"keep their residuals as float32, not as {self._feedback.dtype}; write "
                f"'{inner} | ef' for it, or pass sparse_as_dense=True"
            )

    def _context(self, rows: int) -> Context:
        size, runtime = self._process_set.size(), self._runtime
        return Context(
            name=self._name,
            shape=(rows, *self._shape[1:]),
            numel=rows * prod(self._shape[1:]),
            state={},
            step=int(self._state.get("step", 0)),
            rank=self._process_set.rank(),
            size=size,
            seed=runtime.engine.limits.seed,
            workspace=self._workspace,
        )

    def _encoded(self, rows: Array, places: Array) -> Array:
        if not self._packed:
            return rows
        context = self._context(len(places))
        if self._feedback is not None and self._feedback.forgets(context.step):
            self._state.pop("rows", None)
        x = to_float32(flat(rows), self._dtype, self._workspace, "rows")
        if not x.size:
            return np.empty(0, np.uint8)
        table = None
        if self._feedback is not None:
            table = self._state.get("rows")
            if table is not None and table.shape != self._shape:
                raise InvalidArgument(
                    f"the residual of {self._shown!r} is of shape {list(table.shape)}, the "
                    f"variable of {list(self._shape)}; with another shape it needs another name"
                )
            if table is None:  # memory that is zero and that nobody has touched costs nothing
                table = self._state["rows"] = np.zeros(self._shape, np.float32)
            self._before = table[places], places
            kept, target = self._before[0].reshape(-1), np.empty_like(x)
            target_into(x, kept, self._feedback.decay, target, context)
            x = target
        payload = encoded(self._inner, x, context)
        if table is not None:
            sent = np.empty_like(x)
            self._inner.decompress(payload, sent, context)
            residual = kept.copy()  # the rows of before stay what they were
            keep_lost(x, sent, residual, context)
            table[places] = residual.reshape(-1, *self._shape[1:])
        data = np.empty(serialised_size(payload), np.uint8)
        serialise(payload, data)
        return data

    def _decoded(self, data: Array, sizes: tuple[int, ...], counts: tuple[int, ...]) -> Array:
        width = prod(self._shape[1:])
        out = np.empty(sum(counts) * width, np.float32)
        start = first = 0
        for size, count in zip(sizes, counts, strict=True):
            if count:
                part = out[first : first + count * width]
                payload = deserialise(data[start : start + size])
                self._inner.decompress(payload, part, self._context(count))
            start, first = start + size, first + count * width
        return out.reshape(-1, *self._shape[1:]).astype(numpy_dtype(self._dtype), copy=False)
