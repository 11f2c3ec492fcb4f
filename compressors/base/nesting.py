"""What a compressor wraps, or chains, and what is true of it or of one of those."""

from __future__ import annotations

from ringlet.compressors.base.chain import Chain
from ringlet.compressors.base.contract import Compressor, wrapped_fields
from ringlet.compressors.base.modifier import Modifier


def inside(compressor: Compressor) -> list[Compressor]:
    """Return the compressors that ``compressor`` wraps, or chains."""
    found = [getattr(compressor, field.name) for field in wrapped_fields(type(compressor))]
    return [part for part in found if isinstance(part, Compressor)]


def innermost(compressor: Compressor) -> Compressor:
    """Return what the modifiers of ``compressor`` modify."""
    while isinstance(compressor, Modifier) and compressor.inner is not None:
        compressor = compressor.inner
    return compressor


def nested(compressor: Compressor) -> list[Compressor]:
    """Return ``compressor`` and all that it wraps, those outside first."""
    return [compressor, *(each for part in inside(compressor) for each in nested(part))]


def is_plugin(compressor: Compressor) -> bool:
    """Whether the compressor, or one inside it, is not one of Ringlet's; the same on all ranks."""
    names = [type(each).__module__ for each in nested(compressor)]
    return not all(name.startswith("ringlet.compressors.") for name in names)


def overrides(compressor: Compressor, method: str) -> bool:
    """Whether the compressor, or one inside it, defines ``method`` rather than passing it on."""
    passing = [getattr(cls, method) for cls in (Compressor, Modifier, Chain)]
    return any(getattr(type(each), method) not in passing for each in nested(compressor))
