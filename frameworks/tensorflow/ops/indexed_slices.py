"""IndexedSlices, the gradients of embeddings: reduced as rows, without the whole table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf

from ringlet.compressors.core.context import State
from ringlet.job.process_sets import InvalidArgument
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.gradients.sparse_rows import RowExchange
from ringlet.shared.reduction_arguments import Reduction
from ringlet.tensorflow.ops.bridge import operation_name, run
from ringlet.tensorflow.ops.tensors import dense, dtype_of
from ringlet.tensorflow.ops.topology_ops import size_of

_UNKNOWN = (1 << 62,)  # rows of a table whose size nobody has told


def allreduce_slices(slices: Any, asked: Reduction) -> Any:
    """Return the sum or average of IndexedSlices over all ranks; see ``allreduce``.

    The average of integers is a quotient in floating point. Raises NotImplementedError, as Horovod
    does, for other operations and for integers with a prescale or postscale factor;
    InvalidArgument for compressors that remember rows, and for rows of unknown size.
    """
    op, factors, process_set = asked.op, asked.factors, asked.process_set
    refuse_other_ops(op)
    cast, compressor = asked.cast, asked.compressor
    if compressor.traits().stateful:
        raise InvalidArgument(
            f"compression={str(compressor)!r} remembers rows, which only DistributedGradientTape "
            "and DistributedOptimizer keep; here use one without feedback"
        )
    values = dense(slices.values, "the values of IndexedSlices")
    if values.shape.rank is None or values.shape[1:].num_elements() is None:
        raise InvalidArgument("IndexedSlices need values whose shape behind the rows is known")
    if values.dtype.is_integer and factors != (1.0, 1.0):  # of the class that Horovod raises
        raise NotImplementedError("IndexedSlices of whole numbers cannot be scaled; cast them")
    if op is ReduceOp.AVERAGE and values.dtype.is_integer:  # a quotient, as in Horovod
        total = allreduce_slices(slices, replace(asked, op=ReduceOp.SUM))
        mean = total.values / tf.cast(size_of(process_set), total.values.dtype)
        return tf.IndexedSlices(mean, total.indices, total.dense_shape)
    indices = tf.convert_to_tensor(slices.indices)
    dtype, width = dtype_of(values), tuple(values.shape[1:])
    rows = _rows(slices.dense_shape)
    number = process_set.number()
    named = operation_name("allreduce_slices", asked.name, values, number)
    context = None
    if cast is not None:
        values, context = cast.compress(values)
        dtype = dtype_of(values)

    def combine(arrays: list[Array]) -> list[Array]:
        state: State = {}
        exchange = RowExchange(
            current(), named(), (*rows, *width), dtype, compressor, state, op, process_set
        )
        given, places = arrays
        given = given * given.dtype.type(factors[0]) if factors[0] != 1.0 else given
        exchange.start(given, places)
        summed, found = exchange.wait()
        summed = summed * summed.dtype.type(factors[1]) if factors[1] != 1.0 else summed
        return [summed, found.astype(places.dtype, copy=False)]

    outputs = [(dtype, (None, *width)), (indices.dtype.name, (None,))]
    combined, found = run(combine, [values, indices], outputs)
    if cast is not None:
        combined = cast.decompress(combined, context)
    return tf.IndexedSlices(combined, found, slices.dense_shape)


def refuse_other_ops(op: ReduceOp) -> None:
    """Raise NotImplementedError, as Horovod does, unless rows can be combined by ``op``."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):  # undefined for rows that ranks lack
        raise NotImplementedError(  # the class that Horovod raises, and its users catch
            f"IndexedSlices can be summed or averaged, not combined with op={op.name.title()}; "
            "pass tf.convert_to_tensor(...) of them"
        )


def _rows(dense_shape: Any) -> tuple[int, ...]:
    if dense_shape is None:
        return _UNKNOWN
    known = tf.get_static_value(dense_shape)
    return _UNKNOWN if known is None else (int(known[0]),)
