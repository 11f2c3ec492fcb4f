"""Per-layer routes: which compressor a parameter gets, by its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.errors import CompressorError, SpecError
from ringlet.compressors.specs.parser import resolve

Spec = str | Compressor | None
Routes = Mapping[str, Spec]

_ROUTES = "a mapping goes from patterns of parameters' names to specs, as {'*.bias': 'none', '*': "
_ROUTES += "'int8 | ef'}; options stand in a spec, as in 'topk(ratio=0.01)'"


class Router:
    """Maps parameter names to compressors.

    ``spec`` is one spec for all, or a mapping from shell-style patterns to specs in which the
    first match wins: ``{"*.bias": "none", "embed*": "fp16", "*": "int8 | ef"}``. A name that no
    pattern matches travels uncompressed.
    """

    def __init__(self, spec: Spec | Routes) -> None:
        if isinstance(spec, Mapping):
            bad = [pattern for pattern in spec if not isinstance(pattern, str)]
            if bad:
                raise SpecError(f"a route's pattern is a string, not {bad[0]!r}: {_ROUTES}")
            self._routes = [(pattern, _target(pattern, spec[pattern])) for pattern in spec]
        else:
            self._routes = [("*", resolve(spec))]

    def __call__(self, *names: str) -> Compressor:
        """Return the compressor for a parameter, under whichever of its ``names``."""
        for pattern, compressor in self._routes:
            if any(fnmatchcase(name, pattern) for name in names):
                return compressor
        return resolve("none")

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that none of ``names`` matches, "*" excepted."""
        listed = list(names)
        patterns = [pattern for pattern, _ in self._routes if pattern != "*"]
        return [p for p in patterns if not any(fnmatchcase(name, p) for name in listed)]

    @property
    def by_name(self) -> bool:
        """Whether what a parameter gets depends on its name."""
        return any(pattern != "*" for pattern, _ in self._routes)

    @property
    def compressors(self) -> list[Compressor]:
        """The compressors that patterns lead to, in the order of the patterns."""
        return [compressor for _, compressor in self._routes]

    def __str__(self) -> str:
        if [pattern for pattern, _ in self._routes] == ["*"]:
            return str(self._routes[0][1])
        return ", ".join(f"{pattern}: {compressor}" for pattern, compressor in self._routes)


def _target(pattern: str, target: Spec) -> Compressor:
    if not isinstance(target, str | Compressor | None):
        raise SpecError(f"the route {pattern!r} leads to {target!r}, which is no spec: {_ROUTES}")
    try:
        return resolve(target)
    except CompressorError as error:
        error.add_note(f"That is where the route {pattern!r} leads: {_ROUTES}.")
        raise
