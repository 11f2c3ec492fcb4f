"""What compression does to single layers: bytes, what an encoding loses, what is held back."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ringlet.compressors import NoCompression, Workspace
from ringlet.compressors.modifiers.residuals import held_back, plain, wide
from ringlet.fusion.devices.host import Place
from ringlet.fusion.planning.member import Member
from ringlet.fusion.recording.events import ObservedBucket

log = logging.getLogger("ringlet")


def sizes(bucket: ObservedBucket, wire_bytes: float) -> list[dict[str, Any]]:
    """Return each member's facts, and its part of the bucket's ``wire_bytes``."""
    shares = bucket.shares()
    whole = sum(shares) or 1.0
    size = bucket.size
    return [
        {
            "name": member.name,
            "compressor": str(member.compressor),
            "collective": member.strategy,
            "elements": member.numel,
            "raw_bytes": 2 * (size - 1) / size * member.nbytes,
            "wire_bytes": wire_bytes * share / whole,
        }
        for member, share in zip(bucket.members, shares, strict=True)
    ]


def losses(bucket: ObservedBucket) -> dict[str, dict[str, float]]:
    """Return, by name, the gradient's norm and the relative error of its encoding on this rank.

    Compresses once more, on a copy of what the compressor remembers, so that nothing changes. The
    error is that of what was to be sent, residual included: |p - C(p)| / |p|. Exchanges in rounds
    have none of their own. Of tensors on a GPU that is done on a copy in host memory, and waits.
    """
    found: dict[str, dict[str, float]] = {}
    for member in bucket.members:
        x = _values(member)
        found[member.name] = {"norm": _norm(x)}
        if member.strategy != "rounds" and not isinstance(member.compressor, NoCompression):
            error = _relative_error(member, x)
            if error is not None:
                found[member.name]["relative_error"] = error
    return found


def _values(member: Member) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a copy of what is to be compressed."""
    with member.place.at_work():
        member.place.after([member.ready])
        return np.array(member.place.to_host(member.values()))


def _on_host(state: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """Return ``state`` with its arrays in host memory: itself, where they are there."""
    if not place.ordered:
        return state
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found[key] = _on_host(value, place)
        else:
            found[key] = place.to_host(value) if hasattr(value, "dtype") else value
    return found


def residual_norm(member: Member) -> float | None:
    """Return the Euclidean norm of all that is held back, or None if nothing can be.

    For a piece that is what was held back of it before it was sent, not of its sums.
    """
    state = plain(dict(_on_host(member.state, member.place)))
    if member.whole is not None:
        own = slice(member.start, member.start + member.numel)
        arrays = {key: state.get(key) for key in ("residual", "u", "v")}
        pieces = {key: held[own] for key, held in arrays.items() if isinstance(held, np.ndarray)}
        state = pieces or state
    norms = [_norm(held) for held in held_back(state)]
    return math.hypot(*norms) if norms else None


def _relative_error(member: Member, x: np.ndarray[Any, np.dtype[np.float32]]) -> float | None:
    n, own = member.numel, slice(member.start, member.start + member.numel)
    state = {
        key: value[own]
        if isinstance(value, np.ndarray) and value.size == member.request.numel
        else value
        for key, value in plain(dict(_on_host(member.state, member.place))).items()
    }
    context = replace(
        member.context(0, 1),
        state=copy.deepcopy(state), shape=member.request.shape if member.whole is None else (n,),
        numel=n, offset=0, xp=np, workspace=Workspace(),
    )  # fmt: skip
    decoded = np.empty(x.size, np.float32)
    try:
        payload = member.compressor.compress(x, context)
        member.compressor.decompress(payload, decoded, context)
    except Exception:
        log.debug("no relative error of %r", member.request.name, exc_info=True)
        return None
    residual = wide(context.state)
    lost = x - decoded
    if residual is not None and residual.size == x.size:
        lost = residual
    target = _norm(decoded + lost)
    if target == 0:
        return 0.0
    error = _norm(lost) / target
    return error if math.isfinite(error) else None


def _norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))
