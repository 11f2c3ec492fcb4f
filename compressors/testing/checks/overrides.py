"""Checks of what is overridden for speed: results must not show which way the engine took."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Payload, empty_payload
from ringlet.compressors.core.context import Array
from ringlet.compressors.testing.checks.one_call import PURE, by_payload, same, same_payload
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, halves, vectors
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import context, decode, encode


@needs(*PURE)
def check_fast_paths_agree(compressor: Compressor) -> None:
    """Overrides are for speed: the engine uses whichever fits; results must not show which.

    Round as compress and decompress do, in the same order and in float32. sum_into gets as many
    payloads as there are ranks.
    """

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        reference = compressor.compress(x, context(x))
        payload = encode(compressor, x, context(x))
        assert same_payload(payload, reference), "encode_into and compress give different payloads"
        decoded = decode(compressor, payload, x.size, context(x))
        total = gaussian(x.size, 1)
        with np.errstate(all="ignore"):
            expected = total + decoded
            compressor.accumulate(payload, total, context(x))
            assert same(total, expected), "accumulate is not decompress and add"
            compressor.sum_into([payload], total, context(x))
            assert same(total, decoded), "sum_into of one payload is not decompress"
            payloads = [encode(compressor, y, context(x)) for y in (x, -x, x[::-1].copy())]
            parts = [decode(compressor, part, x.size, context(x)) for part in payloads]
            compressor.sum_into(payloads, total, context(x))
            assert _close(total, parts), "sum_into is not the sum of all that is decoded"

    for_all(vectors(), body)
    for seed in range(4):
        body(halves(seed))


def _close(total: Array, parts: list[Array]) -> bool:
    """Whether ``total`` is the sum of ``parts``, but for where it is rounded."""
    expected = np.sum(parts, axis=0, dtype=np.float64)
    if not np.isfinite(expected).all():
        return not np.isfinite(total).all()
    largest = float(np.abs(parts).max(initial=0))
    return bool(np.abs(total - expected).max(initial=0) <= 1e-5 * largest + 1e-37)


@needs("fast_paths_agree")
def check_fused_feedback_agrees(compressor: Compressor) -> None:
    """Error feedback in one pass must remember what two passes would: a residual that is a little
    off in every step is a gradient that is off after a thousand.

    Compress p = x + decay * residual, and leave p less what was sent in residual; where that is not
    finite, leave the old one.
    """
    if not by_payload(compressor) or compressor.traits().stateful:
        return
    cls, fixed = type(compressor), compressor.traits().fixed_size
    name = "feedback_into" if fixed else "compress_feedback"
    if getattr(cls, name) is getattr(Compressor, name):
        return

    def step(owner: Any, x: Array, residual: Array, decay: float) -> Payload:
        ctx = context(x)
        if not fixed:
            sent: Payload = owner.compress_feedback(compressor, x, residual, decay, ctx)
            return sent
        payload = empty_payload(compressor, x.size, ctx)
        owner.feedback_into(compressor, x, residual, decay, payload, ctx)
        return payload

    for n in (1, 100, 3000):
        for decay in (1.0, 0.5):
            for bad in (0.0, np.nan, np.inf):
                x, residuals = gaussian(n, 1), [gaussian(n, 2), gaussian(n, 2)]
                x[n // 2] += np.float32(bad)
                with np.errstate(all="ignore"):
                    sent = [
                        step(owner, x, residual, decay)
                        for owner, residual in zip((cls, Compressor), residuals, strict=True)
                    ]
                where = f"with decay={decay}" + (f" and {bad} in x" if bad else "")
                assert same_payload(*sent), (
                    f"{name} {where} gives another payload than compress of x + decay * residual"
                )
                assert same(*residuals), (
                    f"{name} {where} leaves another residual than x + decay * residual less what "
                    "is sent"
                )


CHECKS = (check_fast_paths_agree, check_fused_feedback_agrees)
