"""Means over a mesh's axis of which payloads travel, inside ``jax.shard_map``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringlet.compressors import Compressor
from ringlet.compressors.lowrank.powersgd import PowerSGD
from ringlet.compressors.modifiers.ef import ErrorFeedback
from ringlet.compressors.specs.routes import Spec
from ringlet.jax.sharded.array_codecs import in_64_bits, product
from ringlet.jax.sharded.codec_choice import codec_for
from ringlet.jax.sharded.counter_random import Around
from ringlet.jax.sharded.low_rank import Factors
from ringlet.ring.callers import public
from ringlet.shared.compression import as_compressor


@public
def sharded_mean(
    x: Any,
    axis_name: str,
    compression: Spec = None,
    residual: Any = None,
    step: Any = 0,
    name: str = "tensor",
    seed: int = 0,
    reduction: str = "float32",
) -> tuple[Any, Any]:
    """Return the mean of ``x`` over the axis, of ``x``'s shape and dtype, and the next residual.

    To be called inside ``jax.shard_map``. Payloads travel by ``lax.all_gather``, and every device
    adds up what they stand for in the axis's order, in float32. Sums of what is not compressed, or
    cast to 16 bits, travel by ``lax.psum`` with ``reduction="wire"``: of 16 bits where that is what
    there is.

    ``compression`` is a spec of none, fp16, bf16, int8, int4, maxnorm, qsgd, natural, terngrad,
    onebit, block_topk and powersgd, with hadamard and ef behind them. ``residual`` is what
    ``sharded_state`` returned, or the call before; None begins anew. With ``ef`` it is a flat
    float32 array of ``x.size`` elements, with powersgd a dict of such arrays, and otherwise None.
    ``step`` (an integer, or an array), ``name`` and ``seed`` decide on random numbers; those that
    round depend on the device's place on the axis too. Payloads and means are those of the
    compressors, bit for bit; with powersgd to within rounding. Raises ValueError for other
    compressors and for a residual of another shape, TypeError unless ``x`` is an array of
    floating-point numbers.
    """
    _check_numbers(x)
    if reduction not in ("float32", "wire"):
        raise ValueError(f"reduction is 'float32' or 'wire', not {reduction!r}")
    feedback, compressor = _parts(compression)
    _check_residual(residual, x.size, feedback, compressor)
    drawn_by = name, step, seed
    made: tuple[Any, Any] = _mean(x, axis_name, feedback, compressor, residual, drawn_by, reduction)
    return made


@public
def sharded_state(
    compression: Spec, shape: tuple[int, ...], step: int = 0, name: str = "tensor", seed: int = 0
) -> Any:
    """Return what ``sharded_mean`` takes as ``residual`` in the first step, of one device.

    A flat float32 array of zeros with ``ef``; with powersgd a dict of that ("residual") and of the
    factor to begin with ("right"), which is drawn here because ``step``, ``name`` and ``seed`` are
    known; None where nothing is remembered.
    """
    feedback, compressor = _parts(compression)
    zeros = None if feedback is None else jnp.zeros(math.prod(shape), jnp.float32)
    if type(compressor) is not PowerSGD:
        codec_for(compressor)
        return zeros
    factors, state = Factors(compressor, tuple(shape)), {} if zeros is None else {"residual": zeros}
    if compressor.warm_start and factors.matrix is not None:
        state["right"] = factors.drawn(name, step, seed)
    return state


@in_64_bits
def _mean(
    x: Any,
    axis_name: str,
    feedback: ErrorFeedback | None,
    compressor: Compressor,
    residual: Any,
    drawn_by: tuple[str, Any, int],
    reduction: str,
) -> tuple[Any, Any]:
    around = Around(*drawn_by, jax.lax.axis_index(axis_name))
    values, size = x.astype(jnp.float32).reshape(-1), jax.lax.axis_size(axis_name)
    if type(compressor) is PowerSGD:
        factors = Factors(compressor, x.shape)
        mean, after = _low_rank(
            factors, compressor, feedback, values, residual, around, axis_name, size, reduction
        )
        return mean.reshape(x.shape).astype(x.dtype), after
    codec, after = codec_for(compressor), None
    # A program of its own, which is traced once and not for each device.
    decode = jax.jit(lambda payload: codec.decode(payload, x.size, around))
    unit = np.float32(1.0 / size)
    divided = compressor.traits().predivide and size > 1
    if divided:
        values = product(values, unit)
    if feedback is not None:
        held = jnp.zeros_like(values) if residual is None else residual
        values = _carried(values, held, feedback)
        payload = codec.encode(values, around)
        lost = values - decode(payload)
        after = jnp.where(jnp.isfinite(lost), lost, held)
    else:
        payload = codec.encode(values, around)
    if codec.adds and reduction == "wire":
        total = decode({"values": jax.lax.psum(payload["values"], axis_name)})
    else:
        total = _summed(decode, payload, axis_name, size)
    mean = total if divided else product(total, unit)
    return mean.reshape(x.shape).astype(x.dtype), after


def _parts(compression: Spec) -> tuple[ErrorFeedback | None, Compressor]:
    """Return error feedback, if there is any that is written in JAX's operations, and the rest."""
    compressor = as_compressor(compression)
    if type(compressor) is ErrorFeedback and compressor.store is None and not compressor.reset:
        return compressor, compressor.wrapped_compressor
    return None, compressor


def _check_numbers(x: Any) -> None:
    """Raise TypeError for what float32 does not stand for."""
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"x is one array, not a {type(x).__name__}: call sharded_mean for each of "
            "jax.tree.leaves(grads), with a residual of its own"
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"x is of dtype {x.dtype.name}, and sharded_mean takes real numbers: pass x.real and "
            "x.imag one after the other; optax.contrib.split_real_and_imaginary(optimizer) has "
            "them apart"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is of dtype {x.dtype.name}, and sharded_mean takes floating-point numbers: pass "
            "x.astype('float32'), or use jax.lax.psum, which adds whole numbers without rounding"
        )


def _check_residual(
    residual: Any, size: int, feedback: ErrorFeedback | None, compressor: Compressor
) -> None:
    """Raise TypeError or ValueError for a residual that is not of ``size`` elements in a row."""
    if residual is None:
        return
    if type(compressor) is PowerSGD:
        if not isinstance(residual, dict):
            raise TypeError(
                "with powersgd residual is the dict that sharded_state returns, not "
                f"{type(residual).__name__}"
            )
        residual = residual.get("residual")
    if feedback is None or residual is None:
        return
    shape = getattr(residual, "shape", None)
    if shape != (size,):
        found = type(residual).__name__ if shape is None else f"an array of shape {shape}"
        raise ValueError(
            f"residual is a flat array of shape ({size},), as many elements as x has on this "
            f"device, not {found}. Where jax.shard_map cuts off a row for each device, pass "
            "residual[0]"
        )


def _carried(values: Any, held: Any, feedback: ErrorFeedback) -> Any:
    decay = feedback.decay
    return values + (held if decay == 1 else product(held, np.float32(decay)))


def _low_rank(
    factors: Factors,
    compressor: PowerSGD,
    feedback: ErrorFeedback | None,
    values: Any,
    state: Any,
    around: Around,
    axis_name: str,
    size: int,
    reduction: str,
) -> tuple[Any, Any]:
    """Return the mean, and the state behind it."""
    known, after = {} if state is None else state, {}

    def mean(array: Any) -> Any:
        if reduction == "wire":
            return jax.lax.pmean(array, axis_name)
        every = jax.lax.all_gather(array, axis_name)
        return (sum(every[i].astype("float64") for i in range(size)) / size).astype("float32")

    right = known.get("right")
    if right is None and factors.matrix is not None:
        right = factors.drawn(around.name, around.step, around.seed)
    held = known.get("residual", jnp.zeros_like(values))
    target = values if feedback is None else _carried(values, held, feedback)
    made, own, right = factors.reduce(target, right, mean)
    if feedback is not None:
        lost = target - own
        after["residual"] = jnp.where(jnp.isfinite(lost) & jnp.isfinite(made), lost, held)
    if compressor.warm_start and factors.matrix is not None:
        after["right"] = right
    return made, after


def _summed(
    decode: Callable[[dict[str, Any]], Any], payload: dict[str, Any], axis_name: str, size: int
) -> Any:
    """Return the sum of what all devices' payloads stand for, in the order of the axis."""
    every = {name: jax.lax.all_gather(array, axis_name) for name, array in payload.items()}
    parts = [decode({name: array[rank] for name, array in every.items()}) for rank in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
