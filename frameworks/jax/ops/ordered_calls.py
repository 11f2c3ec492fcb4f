"""Calls out of compiled programs that run in the order in which they were traced, on all ranks.

XLA runs what does not depend on one another in any order, and a call that waits for other ranks
holds a thread. So the calls of a program have an ordered effect: its token goes from one to the
next, and ranks that run one program make them in one order.

``jax.experimental.buffer_callback`` gives callbacks views of XLA's own memory, but no order. What
it is lowered to is used here with a token before the operands. Where this JAX has no such thing,
and on other devices than CPUs, ``io_callback(ordered=True)`` does the same, with copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringlet.jax.ops.raised_errors import noted, watch_programs
from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import ALIGNMENT, allocate, numpy_dtype

# Reads the arrays given, and writes to those of the results.
Function = Callable[[Sequence[Array], Sequence[Array]], None]
Output = tuple[str, tuple[int, ...]]  # dtype by name, and shape
Aliases = tuple[tuple[int, int], ...]  # of which input's memory an output may be

_SHARED = 1 << 16  # bytes from which an array becomes one of JAX's without a copy

_NO_DERIVATIVE = (
    "jax.grad goes through the collectives of ringlet.jax (allreduce, allgather, ...), but not "
    "through an update of reduce_gradients or a DistributedOptimizer: to differentiate reduced "
    "gradients, reduce them by hvd.grouped_allreduce(jax.tree.leaves(grads)), or else put "
    "jax.lax.stop_gradient around what is given"
)
_ONE_DEVICE = (
    "collectives of ringlet.jax, which a rank runs on one device: in programs over several devices "
    "of a rank use hvd.sharded_mean in jax.shard_map, and call other collectives outside of them"
)
_NO_BATCH = (
    "a collective cannot be mapped by jax.vmap, where each rank would make one call for a batch: "
    "map what comes before and behind it, and call it once for the mapped arrays"
)


def call(
    function: Function, arrays: Sequence[Any], outputs: Sequence[Output], aliases: Aliases = ()
) -> list[Any]:
    """Return what ``function(arrays, results)`` writes to results of these dtypes and shapes.

    At once for arrays with values; inside ``jax.jit`` when the program runs, after the calls that
    were traced before it. An output that is an input's alias lies in that input's memory where the
    program no longer needs it, and begins as a copy of it elsewhere or is unwritten.
    """
    given = [jnp.asarray(array) for array in arrays]
    if has_values(given):
        return at_once(function, given, outputs)
    primitive = _primitive() if jax.default_backend() == "cpu" else None
    if primitive is None:
        return _copied(function, given, outputs)
    results: list[Any] = primitive.bind(
        *given, function=function, outputs=tuple(outputs), aliases=aliases
    )
    return results


def at_once(function: Function, arrays: Sequence[Any], outputs: Sequence[Output]) -> list[Any]:
    """Return the results of a call with values, as JAX's arrays."""
    results = allocate([dtype for dtype, _ in outputs], [shape for _, shape in outputs])
    function([to_array(array) for array in arrays], results)
    return [to_jax(result) for result in results]


def to_array(array: Any) -> Array:
    """Return the memory of an array with values, to be read only."""
    return np.asarray(array)


def to_jax(array: Array) -> Any:
    """Return an array that nobody else uses as one of JAX's; large ones share memory.

    It is committed to no device: programs that take other arrays too would be compiled twice.
    """
    if array.nbytes >= _SHARED and array.ctypes.data % ALIGNMENT == 0:
        return jax.device_put(array, may_alias=True)
    return jnp.array(array)


def has_values(arrays: Sequence[Any]) -> bool:
    """Whether a call with ``arrays`` is made now, and not when a program runs."""
    return not in_trace() and not any(isinstance(array, jax.core.Tracer) for array in arrays)


def in_trace() -> bool:
    """Whether JAX is tracing a program."""
    from jax._src.core import trace_state_clean  # the public module has none

    return not trace_state_clean()


def refuse_trace(what: str) -> None:
    """Raise RuntimeError inside a program, where ``what`` would run once, at tracing."""
    if in_trace():
        raise RuntimeError(
            f"{what} inside jax.jit would run once, while it is traced, and never again; call it "
            "outside"
        )


@functools.cache
def _primitive() -> Any:
    """Return the primitive of ordered calls; None where this JAX has not what it is made of."""
    try:
        from jax._src import core, effects, ffi
        from jax._src.interpreters import ad, batching, mlir
        from jax.experimental import buffer_callback
    except ImportError:
        return None

    class RankOrder(effects.Effect):
        """One call after the other."""

        def __repr__(self) -> str:
            return _ONE_DEVICE  # JAX names an effect where it refuses a program of several devices

    order = RankOrder()
    watch_programs(order)
    for kinds in (
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.ordered_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        kinds.add_type(RankOrder)
    made = core.Primitive("ringlet_call")
    made.multiple_results = True

    def evaluated(*arrays: Any, function: Function, outputs: Any, aliases: Aliases) -> Any:
        return at_once(function, arrays, outputs)

    def abstract(*_: Any, function: Function, outputs: Any, aliases: Aliases) -> Any:
        return [core.ShapedArray(shape, numpy_dtype(dtype)) for dtype, shape in outputs], {order}

    def lowered(ctx: Any, *operands: Any, function: Function, outputs: Any, aliases: Any) -> Any:
        behind = 1 + len(operands)

        def callback(_: Any, *buffers: Any) -> tuple[()]:
            with noted():
                given, results = buffers[1:behind], buffers[behind + 1 :]  # between them: tokens
                function([np.asarray(b) for b in given], [np.asarray(b) for b in results])
            return ()

        ctx.module_context.add_host_callback(callback)
        index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
        around = ctx.replace(
            avals_in=[core.abstract_token, *ctx.avals_in],
            avals_out=[core.abstract_token, *ctx.avals_out],
        )
        rule = ffi.ffi_lowering(
            "xla_buffer_python_cpu_callback",
            has_side_effect=True,
            operand_output_aliases={i + 1: o + 1 for i, o in aliases},
        )
        token, *results = rule(around, ctx.tokens_in.get(order), *operands, index=index)
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({order: token})))
        return results

    def no_derivative(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(_NO_DERIVATIVE)

    def no_batch(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(_NO_BATCH)

    ad.primitive_jvps[made] = no_derivative
    batching.primitive_batchers[made] = no_batch
    del buffer_callback  # importing it makes the target known to XLA
    made.def_impl(evaluated)  # where a gradient is taken outside of programs
    made.def_effectful_abstract_eval(abstract)
    mlir.register_lowering(made, lowered)
    return made


def _copied(function: Function, arrays: Sequence[Any], outputs: Sequence[Output]) -> list[Any]:
    from jax.experimental import io_callback

    def callback(*given: Any) -> list[Array]:
        results = allocate([dtype for dtype, _ in outputs], [shape for _, shape in outputs])
        with noted():
            function([np.asarray(array) for array in given], results)
        return results

    kinds = [jax.ShapeDtypeStruct(shape, numpy_dtype(dtype)) for dtype, shape in outputs]
    results: list[Any] = io_callback(callback, kinds, *arrays, ordered=True)
    return results
