"""Checks of what a compressor reads and writes: the engine hands it pieces of larger buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Payload, storage
from ringlet.compressors.core.context import Array
from ringlet.compressors.core.errors import InputError
from ringlet.compressors.core.payload import padded
from ringlet.compressors.testing.checks.one_call import PURE, by_payload, same_payload
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, vectors
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import context

_MARKS = 0xA5, 0x5A


@needs("compresses_a_tensor")
def check_other_dtypes_are_refused(compressor: Compressor) -> None:
    """Gradients of other types are widened to float32 by the engine: a codec that takes them as
    they are would send other bytes than it declares, or integers and complex numbers as nonsense.

    Define compress in the body of the class: it then refuses them by itself.
    """
    if not by_payload(compressor):
        return
    x = gaussian(2000, 0)
    wrong: list[Any] = [x.astype(d) for d in ("f8", "f2", "i4", "i8", "u2", "c8", "?")]
    wrong += [x[::2], x.reshape(40, 50), x.reshape(40, 50).T, list(map(float, x))]
    for value in wrong:
        what = f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
        raised: Exception | None = None
        try:
            compressor.compress(value, context(x))
        except Exception as error:
            raised = error
        assert raised is not None, f"{what} is compressed without an error"
        kind = type(raised).__name__
        assert isinstance(raised, InputError), f"{what} fails with {kind}, not InputError"
        assert "float32" in str(raised), f"the error about {what} does not name float32"


@needs(*PURE)
def check_results_are_float32_at_every_precision(compressor: Compressor) -> None:
    """Values that half precision holds come from a narrower gradient and go back into one: they
    must be treated as any float32, whatever their trailing bits.

    Do not go by the bits of a value's mantissa.
    """
    if not by_payload(compressor):
        return
    x = gaussian(2000, 1)
    for narrow in (x.astype("f2").astype("f4"), _bfloat16(x)):
        out = np.full(x.size, np.nan, np.float32)
        payload = compressor.compress(narrow, context(narrow))
        compressor.decompress(payload, out, context(narrow))
        assert out.dtype == np.float32, f"out became {out.dtype}"
        assert np.isfinite(out).all(), "values of half precision decode to NaN or Inf"


@needs(*PURE)
def check_writes_only_where_it_should(compressor: Compressor) -> None:
    """Outputs and payloads are pieces of shared buffers: a byte too many is a neighbour's gradient,
    and an array that is replaced instead of filled never travels.

    Fill what is given, as long as it is: payload[name][...] = values, out[:] = values.
    """
    if not by_payload(compressor):
        return

    def body(x: Array) -> None:
        payload = compressor.compress(x, context(x))
        if compressor.traits().fixed_size:
            payload, again = (_filled(compressor, x, mark) for mark in _MARKS)
            assert same_payload(payload, again), (
                "encode_into does not fill the arrays it is given; write payload[name][...] = ..."
            )
        before = {name: array.copy() for name, array in payload.items()}
        for method in (compressor.decompress, compressor.accumulate, _summing(compressor)):
            room = np.full(x.size + 16, 7, np.float32)
            with np.errstate(all="ignore"):
                method(payload, room[8 : 8 + x.size], context(x))
            assert (room[:8] == 7).all(), "decoding writes before out"
            assert (room[8 + x.size :] == 7).all(), "decoding writes behind out"
            assert same_payload(payload, before), "decoding changes the payload"

    for_all(vectors(), body)


def _filled(compressor: Compressor, x: Array, mark: int) -> Payload:
    """Return the payload that encode_into writes into a buffer whose bytes are all ``mark``."""
    layout = compressor.layout(x.size)
    ends = np.cumsum([0, *(8 + padded(a.elements * 8) for a in layout)]).tolist()
    buffer = np.full(ends[-1] + 8, mark, np.uint8)
    payload, inside = {}, np.zeros(buffer.size, bool)
    for (name, dtype, elements), end in zip(layout, ends, strict=False):
        size = elements * storage(dtype).itemsize
        payload[name] = buffer[end + 8 : end + 8 + size].view(storage(dtype))
        inside[end + 8 : end + 8 + size] = True
    slots = dict(payload)
    compressor.encode_into(x, payload, context(x))
    assert (buffer[~inside] == mark).all(), "encode_into writes beyond a payload's arrays"
    return slots


def _summing(compressor: Compressor) -> Any:
    def total(payload: Payload, out: Array, ctx: Any) -> None:
        compressor.sum_into([payload, payload], out, ctx)

    return total


def _bfloat16(x: Array) -> Array:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


CHECKS = (
    check_other_dtypes_are_refused,
    check_results_are_float32_at_every_precision,
    check_writes_only_where_it_should,
)
