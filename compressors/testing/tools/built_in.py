"""Ringlet's own compressors as specs: what is to cover all of them takes its list from here."""

from __future__ import annotations

from collections.abc import Iterable

from ringlet.compressors.base.bucketed import Bucketed
from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.specs.parser import parse
from ringlet.compressors.specs.registry import built_in


def every_spec(listed: Iterable[str] = (), left_out: Iterable[str] = ()) -> list[str]:
    """Return the specs ``listed``, and one for each compressor that is in none of them.

    A modifier stands behind qsgd, whose promises all of them take. Names ``left_out`` are not
    looked for.
    """
    specs = list(listed)
    found = {name for spec in specs for name in names_in(parse(spec))}.union(left_out)
    for name, cls in built_in().items():
        if name not in found:
            specs.append(f"qsgd | {name}" if issubclass(cls, Modifier) else name)
    return specs


def names_in(compressor: Compressor) -> set[str]:
    """Return the names of all compressors that ``compressor`` is made of."""
    inside = [part for part in vars(compressor).values() if isinstance(part, Compressor)]
    return {compressor.spec_name}.union(*(names_in(part) for part in inside)) - {""}


def bucketed_specs(listed: Iterable[str]) -> list[str]:
    """Return the specs ``listed``, and one for each other compressor with bucketed CUDA kernels."""
    found = {spec: parse(spec) for spec in every_spec(listed)}
    kept = [spec for spec, c in found.items() if isinstance(c, Bucketed) and c.cuda() is not None]
    return [*listed, *(spec for spec in kept if spec not in listed)]
