"""Checks of kernels that take many tensors a launch: what shares it with a tensor must not show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringlet.compressors.base.contract import Compressor, Payload, storage
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.multitensor import Decoding, Encoding, Sum
from ringlet.compressors.core.payload import padded
from ringlet.compressors.testing.checks.overrides import calls, close
from ringlet.compressors.testing.tools.equality import same, same_payload
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import needs
from ringlet.compressors.testing.tools.simulate import by_payload, context, decode, encode

_SCALE, _DECAY, _WEIGHT = 2.0, 0.5, 0.5
_MARK = 0xA5
_MANY = 37  # more than a warp, or than a table of 32 has room for
_SPOILED, _EMPTY = 5, 20  # the places of tensors with NaN, and without elements


class _Launch(NamedTuple):
    """Tensors of one launch: how many elements they have, of which dtype, in which call."""

    what: str
    lengths: Sequence[int]
    dtype: str = "float32"  # or float16, bfloat16
    spoiled: bool = False
    fields: dict[str, Any] = {}  # noqa: RUF012, which nobody changes


def _launches(compressor: Compressor, empty: bool) -> list[_Launch]:
    """Return what is launched one after the other; tensors without elements are ``empty``'s."""
    many = [(k * k * 7 + 13 * k) % 391 + 1 for k in range(_MANY)]
    if empty:
        many[_EMPTY] = 0
    found = [
        _Launch("three tensors", (100, 2049, 1)),
        _Launch("three other tensors in a second launch", (65, 7, 1000)),
        _Launch(f"{_MANY} tensors", many),
        _Launch(f"{_MANY} tensors, NaN in number {_SPOILED},", many[::-1], spoiled=True),
        _Launch("three tensors of float16", (100, 2049, 1), "float16"),
        _Launch("three tensors of bfloat16", (100, 2049, 1), "bfloat16"),
    ]
    return found + [
        _Launch(f"three tensors with {fields}", (100, 300, 1), fields=fields)
        for fields in calls(compressor, 300)
    ]


def _tensors(launch: _Launch) -> list[Array]:
    """Return the values of a launch, which lie in one array, at odd places, as they are sent."""
    lengths = launch.lengths
    room = np.zeros(sum(lengths) + len(lengths) + 1, storage(launch.dtype))
    found, start = [], 1
    for place, n in enumerate(lengths):
        x = gaussian(n, n + place)
        if launch.spoiled and place == _SPOILED:
            x[n // 2] = np.nan
        room[start : start + n] = _narrowed(x, launch.dtype)
        found.append(room[start : start + n])
        start += n + 1
    return found


def _narrowed(x: Array, dtype: str) -> Array:
    """Round to nearest even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _widened(x: Array) -> Array:
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


class Slots:
    """One array for all payloads of a launch, with marks between them."""

    def __init__(self, compressor: Compressor, lengths: Sequence[int]) -> None:
        parts = [compressor.layout(n) for n in lengths]
        size = sum(8 + padded(part.elements * 8) for layout in parts for part in layout)
        self._room, self._inside = np.full(size + 8, _MARK, np.uint8), np.zeros(size + 8, bool)
        self.payloads: list[Payload] = []
        end = 0
        for layout in parts:
            payload: Payload = {}
            for name, dtype, elements in layout:
                place = slice(end + 8, end + 8 + elements * storage(dtype).itemsize)
                payload[name] = self._room[place].view(storage(dtype))
                self._inside[place] = True
                end += 8 + padded(elements * 8)
            self.payloads.append(payload)

    def kept_between(self) -> bool:
        """Whether nothing was written between the payloads."""
        return bool((self._room[~self._inside] == _MARK).all())


def _contexts(launch: _Launch) -> list[Context]:
    fields = [launch.fields | {"name": f"layer{place}"} for place in range(len(launch.lengths))]
    return [
        context(np.empty(n, np.float32), **given)
        for n, given in zip(launch.lengths, fields, strict=True)
    ]


def _residuals(launch: _Launch, fed: bool) -> list[Array] | list[None]:
    lengths = launch.lengths
    return [gaussian(n, 3) for n in lengths] if fed else [None] * len(lengths)


@needs("fast_paths_agree", "fused_feedback_agrees")
def check_many_tensors_agree(compressor: Compressor) -> None:
    """Kernels that take many tensors a launch are for speed: what becomes of a tensor must not show
    which others were there, nor what was launched before.

    Encode scale * x + decay * residual of every one, decode to weight times that, and leave in each
    residual what was lost, unless it is not finite. Tensors begin anywhere in a larger array, have
    any length, and names, offsets and stages of their own; there is no limit to how many there
    are. Return None from multi_tensor(ctx) for arrays that the kernels do not take.
    """
    if not by_payload(compressor) or not compressor.traits().fixed_size:
        return
    kernels = compressor.multi_tensor(Context())
    if kernels is None:
        return
    for launch in _launches(compressor, empty=True):
        for fed in (False, True):
            with np.errstate(all="ignore"):
                _check_launch(compressor, kernels, launch, fed)


def _check_launch(compressor: Compressor, kernels: Any, launch: _Launch, fed: bool) -> None:
    given, contexts = _tensors(launch), _contexts(launch)
    own, residuals = _residuals(launch, fed), _residuals(launch, fed)
    slots, alone = (Slots(compressor, launch.lengths) for _ in range(2))
    expected = []
    for x, kept, payload, ctx in zip(given, own, alone.payloads, contexts, strict=True):
        target = _widened(x) * np.float32(_SCALE)
        if kept is None:
            compressor.encode_into(target, payload, ctx)
        else:
            compressor.feedback_into(target, kept, _DECAY, payload, ctx)
        decoded = decode(compressor, payload, x.size, ctx) * np.float32(_WEIGHT * _SCALE)
        expected.append(_narrowed(decoded, launch.dtype))
    every = zip(given, slots.payloads, contexts, residuals, strict=True)
    tensors = [Encoding(x, x.size, slot, ctx, residual=kept) for x, slot, ctx, kept in every]
    kernels.encode(tensors, scale=_SCALE, decay=_DECAY, weight=_WEIGHT)
    which = f"of {launch.what}{' with residuals' if fed else ''} "
    how = f"with scale={_SCALE}, decay={_DECAY}, weight={_WEIGHT}"
    assert slots.kept_between(), f"{which}one writes beyond its payload's arrays"
    outs = _tensors(launch)  # side by side too
    kernels.decode(
        [Decoding(out, t.payload, t.ctx) for out, t in zip(outs, tensors, strict=True)],
        scale=_SCALE,
    )
    for place, (out, want) in enumerate(zip(outs, expected, strict=True)):
        assert same(_widened(out), _widened(want)), (
            f"{which}number {place} decodes to something else than on its own, {how}"
        )
        one, kept = residuals[place], own[place]
        assert one is None or kept is None or same(one, kept), (
            f"{which}number {place} keeps another residual than on its own, {how}"
        )


@needs("fast_paths_agree", "fused_feedback_agrees")
def check_many_varying_tensors_agree(compressor: Compressor) -> None:
    """Kernels that take many tensors of variable payloads are for speed too: what becomes of a
    tensor must not show which others were there, nor what was launched before.

    Compress scale * x + decay * residual of every one, and leave in each residual what was lost if
    feeds says so, unless it is not finite; decode to scale times the sum of all payloads. Payloads
    are new arrays, and there is no limit to how many tensors or payloads there are. Return None
    from multi_varying(ctx) for arrays that the kernels do not take.
    """
    if not by_payload(compressor) or compressor.traits().fixed_size:
        return
    kernels = compressor.multi_varying(Context())
    if kernels is None:
        return
    waiting: list[tuple[Payload, Payload]] = []
    for launch in _launches(compressor, empty=False):
        for fed in (False, True) if kernels.feeds else (False,):
            with np.errstate(all="ignore"):
                waiting += _check_varying(compressor, kernels, launch, fed)
    assert all(same_payload(*pair) for pair in waiting), (
        "payloads of one launch change in the next: return new arrays, which wait to be sent"
    )


def _check_varying(
    compressor: Compressor, kernels: Any, launch: _Launch, fed: bool
) -> list[tuple[Payload, Payload]]:
    """Return the payloads of a launch, and copies of them."""
    given, contexts = _tensors(launch), _contexts(launch)
    own, residuals = _residuals(launch, fed), _residuals(launch, fed)
    expected = []
    for x, kept, ctx in zip(given, own, contexts, strict=True):
        target = _widened(x) * np.float32(_SCALE)
        expected.append(
            encode(compressor, target, ctx)
            if kept is None
            else compressor.compress_feedback(target, kept, _DECAY, ctx)
        )
    every = zip(given, contexts, residuals, strict=True)
    tensors = [Encoding(x, x.size, {}, ctx, residual=kept) for x, ctx, kept in every]
    sent = kernels.compress(tensors, _SCALE, _DECAY)
    which = f"of {launch.what}{' with residuals' if fed else ''} "
    assert len(sent) == len(given), f"{which}{len(sent)} are compressed"
    outs = _tensors(launch)
    payloads = [[payload] * 3 for payload in expected]
    kernels.decode([Sum(*parts) for parts in zip(outs, payloads, contexts, strict=True)], _SCALE)
    for place, (payload, want) in enumerate(zip(sent, expected, strict=True)):
        assert same_payload(payload, want), (
            f"{which}number {place} is compressed to something else than on its own, with "
            f"scale={_SCALE} and decay={_DECAY}"
        )
        one, kept = residuals[place], own[place]
        assert one is None or kept is None or same(one, kept), (
            f"{which}number {place} keeps another residual than on its own"
        )
        out = outs[place]
        if launch.dtype == "float32":
            part = decode(compressor, want, out.size, contexts[place]) * np.float32(_SCALE)
            assert close(out, [part] * 3, 3), (
                f"{which}number {place} decodes to something else than on its own, from three "
                f"payloads, with scale={_SCALE}"
            )
    return [(p, {name: array.copy() for name, array in p.items()}) for p in sent]


CHECKS = (check_many_tensors_agree, check_many_varying_tensors_agree)
