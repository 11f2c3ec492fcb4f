"""Checks of what is overridden for speed: results must not show which way the engine took."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, Payload, empty_payload
from ringlet.compressors.core.context import Array, Workspace
from ringlet.compressors.testing.tools.equality import same, same_payload
from ringlet.compressors.testing.tools.examples import for_all
from ringlet.compressors.testing.tools.inputs import gaussian, halves, large, vectors
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.simulate import (
    by_payload,
    context,
    decode,
    encode,
    exchanged,
)

_LONG = (1 << 20) + 37  # elements: no whole number of blocks
_FEW = 100
_RANKS = (2, 5, 9, 17, 33, 65, 129)  # one more than a table may be long


@needs(*PURE, "writes_only_where_it_should", "decoding_is_the_same_everywhere")
def check_fast_paths_agree(compressor: Compressor) -> None:
    """Overrides are for speed: the engine uses whichever fits; results must not show which.

    Round as compress and decompress do, in the same order and in float32, and draw what they draw:
    by ctx.key() and ctx.offset. sum_into gets as many payloads as there are ranks, each with scales
    of its own.
    """

    def body(x: Array) -> None:
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
            # Scales of their own: whoever adds codes must not take those of the first. Nor its
            # number of entries: what goes by values selects one of the first, and of others more.
            given = (_one_of(x), x, -x, x[::-1] * np.float32(0.25), x * np.float32(3))
            payloads = [encode(compressor, y, context(x)) for y in given]
            parts = [decode(compressor, part, x.size, context(x)) for part in payloads]
            compressor.sum_into(payloads, total, context(x))
            assert close(total, parts), "sum_into is not the sum of all that is decoded"

    if not by_payload(compressor):
        return
    if not _overrides(compressor, "encode_into", "accumulate", "sum_into"):
        for_all(vectors()[::5], body)  # what is inherited has one way for all of them
        return
    for_all(vectors(), body)
    for seed in range(4):
        body(halves(seed))
        body(halves(seed) * np.float32(seed + 1) / np.float32(7))  # and where no scale is exact
    _check_long(compressor)
    _check_any_call(compressor)
    if _overrides(compressor, "sum_into"):
        _check_many_sums(compressor)


def _check_many_sums(compressor: Compressor) -> None:
    """Raise AssertionError unless as many payloads as there may be ranks are added up."""
    given = [np.roll(gaussian(_FEW, 1), 7 * rank) for rank in range(max(_RANKS))]
    given[0] = _one_of(given[0])
    payloads = [encode(compressor, x, context(x, rank=r)) for r, x in enumerate(given)]
    for count in _RANKS:
        total, at = np.full(_FEW, np.nan, np.float32), context(given[0], size=count)
        parts = [decode(compressor, part, _FEW, at) for part in payloads[:count]]
        compressor.sum_into(payloads[:count], total, at)
        assert close(total, parts, count), (
            f"sum_into of {count} payloads is not the sum of all that is decoded"
        )


def _one_of(x: Array) -> Array:
    """Return ``x`` with zeros in all places but one."""
    one = np.zeros_like(x)
    one[x.size // 2 : x.size // 2 + 1] = x[x.size // 2 : x.size // 2 + 1]
    return one


def calls(compressor: Compressor, n: int) -> list[dict[str, Any]]:
    """Return contexts' fields in which calls differ: the place of a piece among them."""
    granule = compressor.traits().granularity
    found: list[dict[str, Any]] = [{"step": 5, "rank": 2, "size": 4, "seed": 3, "name": "other"}]
    if granule is not None:
        found.append({"offset": 3 * granule, "numel": 3 * granule + n})
        found[-1]["shape"] = (3 * granule + n,)
        if compressor.traits().combine == "gather":
            found.append({"stage": 2, "step": 1, "rank": 1, "size": 3})
    return found


def _check_any_call(compressor: Compressor) -> None:
    """Raise AssertionError where a fast path goes by its context otherwise than the slow one."""
    x = gaussian(_FEW, 5)
    for fields in calls(compressor, x.size):
        payload = encode(compressor, x, context(x, **fields))
        expected = compressor.compress(x, context(x, **fields))
        assert same_payload(payload, expected), (
            f"encode_into and compress give different payloads with {fields}"
        )
        decoded = decode(compressor, payload, x.size, context(x, **fields))
        total = x.copy()
        compressor.accumulate(payload, total, context(x, **fields))
        assert same(total, x + decoded), f"accumulate is not decompress and add with {fields}"
        compressor.sum_into([payload, payload], total, context(x, **fields))
        assert close(total, [decoded, decoded]), (
            f"sum_into is not the sum of all that is decoded with {fields}"
        )


def _check_long(compressor: Compressor) -> None:
    """Raise AssertionError where a fast path gives something else for a long tensor alone."""
    x = large()[:_LONG].copy()  # kernels are compiled anew for what must not be written to
    payload = encode(compressor, x, context(x))
    assert same_payload(payload, compressor.compress(x, context(x))), (
        f"encode_into and compress give different payloads of {_LONG} elements"
    )
    decoded = decode(compressor, payload, x.size, context(x))
    total = x.copy()
    compressor.accumulate(payload, total, context(x))
    assert same(total, x + decoded), f"accumulate of {_LONG} elements is not decompress and add"
    compressor.sum_into([payload, payload], total, context(x))
    assert np.array_equal(total, decoded + decoded), (
        f"sum_into of {_LONG} elements is not the sum of all that is decoded"
    )


def _overrides(compressor: Compressor, *names: str) -> bool:
    """Whether a method of its own stands in the place of one of the base class."""
    cls = type(compressor)
    return any(getattr(cls, name) is not getattr(Compressor, name) for name in names)


def close(total: Array, parts: list[Array], times: int = 1) -> bool:
    """Whether ``total`` is the sum of ``parts``, but for where it is rounded, so many ``times``."""
    expected = np.sum(parts, axis=0, dtype=np.float64)
    if not np.isfinite(expected).all():
        return not np.isfinite(total).all()
    largest = float(np.abs(parts).max(initial=0))
    return bool(np.abs(total - expected).max(initial=0) <= 1e-5 * largest * times + 1e-37)


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
    if cls.keep_residual is not Compressor.keep_residual:
        _check_keeps(compressor)
    if getattr(cls, name) is getattr(Compressor, name):
        return

    def step(
        owner: Any, x: Array, residual: Array, decay: float, fields: dict[str, Any]
    ) -> Payload:
        ctx = context(x, **fields)
        if not fixed:
            sent: Payload = owner.compress_feedback(compressor, x, residual, decay, ctx)
            return sent
        payload = empty_payload(compressor, x.size, ctx)
        owner.feedback_into(compressor, x, residual, decay, payload, ctx)
        return payload

    def agree(x: Array, residual: Array, decay: float, bad: float, **fields: Any) -> None:
        residuals, before = [residual.copy(), residual.copy()], x.copy()
        with np.errstate(all="ignore"):
            sent = [
                step(owner, x, kept, decay, fields)
                for owner, kept in zip((cls, Compressor), residuals, strict=True)
            ]
        assert same(x, before), (
            f"{name} changes x, which is the framework's gradient; compute into a new array"
        )
        where = f"of {x.size} elements with decay={decay}" + (f" and {bad} in x" if bad else "")
        where += f" and {fields}" if fields else ""
        assert same_payload(*sent), (
            f"{name} {where} gives another payload than compress of x + decay * residual"
        )
        assert same(*residuals), (
            f"{name} {where} leaves another residual than x + decay * residual less what is sent"
        )

    for n in (1, 100, 3000):
        for decay in (1.0, 0.5):
            for bad in (0.0, np.nan, np.inf):
                x = gaussian(n, 1)
                x[n // 2] += np.float32(bad)
                agree(x, gaussian(n, 2), decay, bad)
    for fields in calls(compressor, 300):
        agree(gaussian(300, 1), gaussian(300, 2), 0.5, 0.0, **fields)
    agree(large()[:_LONG].copy(), large()[-_LONG:].copy(), 0.5, 0.0)


def _check_keeps(compressor: Compressor) -> None:
    """Raise AssertionError where keep_residual leaves another residual than the base class's."""
    for n in (1, 300, _LONG):
        x = large()[:n].copy()
        payload, kept = encode(compressor, x, context(x)), [x[::-1].copy(), x[::-1].copy()]
        compressor.keep_residual(x, payload, kept[0], context(x))
        Compressor.keep_residual(compressor, x, payload, kept[1], context(x))
        assert same(*kept), (
            f"keep_residual of {n} elements leaves another residual than target less what the "
            "payload decodes to"
        )


@needs(*PURE, "shares_make_the_mean", "one_overflow_is_survived")
def check_feedback_in_rounds_agrees(compressor: Compressor) -> None:
    """Error feedback inside of an exchange must remember what feedback around it would: what this
    rank's share lacks of x + decay * residual, and not what it lacks of the mean.

    Exchange p = x + decay * residual, and leave p less what became of it in residual. Where that is
    not finite, or the result is not, which another rank's overflow shows, leave the old one.
    """
    if by_payload(compressor):
        return
    cls = type(compressor)
    if cls.exchange_feedback is Compressor.exchange_feedback:
        return
    for shape in ((40, 50), (2000,)):
        for decay in (1.0, 0.5):
            for bad in (None, 0, 1):  # the rank that overflows
                ours, theirs = (
                    _fed_back(compressor, owner, shape, decay, bad) for owner in (cls, Compressor)
                )
                where = f"with decay={decay}" + ("" if bad is None else f" and NaN on rank {bad}")
                for what, one, other in zip(("result", "residual"), ours, theirs, strict=True):
                    finite = np.isfinite(other)
                    assert (finite == np.isfinite(one)).all(), (
                        f"exchange_feedback {where} has NaN elsewhere in its {what} than the base "
                        "class's has"
                    )
                    most = float(np.abs(other[finite]).max(initial=0))
                    off = float(np.abs(one[finite] - other[finite]).max(initial=0))
                    assert off <= 1e-4 * most, (
                        f"exchange_feedback {where} leaves another {what} than the base class's "
                        f"does: off by {off / most:.2g} of the largest"
                    )


def _fed_back(
    compressor: Compressor, owner: Any, shape: tuple[int, ...], decay: float, bad: int | None
) -> tuple[Array, Array]:
    """Return the results, and the residuals, of two ranks whose gradients differ by their mean."""
    n, room = int(np.prod(shape)), Workspace()
    given = [gaussian(n, rank) + np.float32(5 * rank) for rank in (0, 1)]
    if bad is not None:
        given[bad][7] = np.nan
    outs = [np.full(n, np.nan, np.float32) for _ in given]
    residuals = [gaussian(n, 2 + rank) for rank in (0, 1)]
    fields: dict[str, Any] = {"shape": shape, "size": 2, "workspace": room}
    contexts = [context(x, rank=rank, **fields) for rank, x in enumerate(given)]
    every = zip(given, outs, residuals, contexts, strict=True)
    with np.errstate(all="ignore"):
        exchanged(
            [owner.exchange_feedback(compressor, x, out, r, decay, c) for x, out, r, c in every],
            room,
        )
    return np.concatenate(outs), np.concatenate(residuals)


CHECKS = (
    check_fast_paths_agree,
    check_fused_feedback_agrees,
    check_feedback_in_rounds_agrees,
)
