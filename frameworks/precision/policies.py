"""Policies by name. Third parties announce theirs in the entry-point group ``ringlet.precision``.

@register_policy("half_head")
def half_head(scale: float = 128.0) -> Policy:
    return Policy("half_head", parameters="float16", scale=StaticScale(scale))
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

from ringlet.compressors.specs.announced import announced, origin, rivals
from ringlet.precision.policy import Policy

GROUP = "ringlet.precision"
NO_POLICY = Policy("fp32", reduction="wire")  # what was chosen otherwise stays as it is

Factory = Callable[..., Policy]
_factories: dict[str, Factory] = {}


def register_policy(name: str) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a function with defaults for all arguments."""

    def register(factory: Factory) -> Factory:
        if name in _factories:
            raise ValueError(f"a precision policy named {name!r} is registered already")
        for option in inspect.signature(factory).parameters.values():
            if option.default is inspect.Parameter.empty:
                raise TypeError(f"policy {name!r}: option {option.name!r} needs a default")
        _factories[name] = factory
        return factory

    return register


def registered_policies() -> list[str]:
    """Return the names of all policies, those of other packages included."""
    return sorted({*_factories, *(point.name for point in announced(GROUP)[0])})


def factory_of(name: str) -> Factory:
    """Return the function behind a name; ValueError, with the closest one, if there is none.

    So, too, where several packages offer the name, or the one that does cannot be used.
    """
    if name in _factories:
        return _factories[name]
    points, damaged = announced(GROUP)
    found = [point for point in points if point.name == name]
    if who := rivals(found):
        raise ValueError(f"precision policy {name!r} is offered by several packages: {who}")
    if found:
        return _loaded(found[0])
    known = registered_policies()
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    raise ValueError(". ".join([f"unknown precision policy {name!r}; {hint}", *damaged]))


def _loaded(point: EntryPoint) -> Factory:
    which = f"precision policy {point.name!r} of package {origin(point)}"
    try:
        factory = point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit, pytest.skip and the like are no Exceptions
        raise ValueError(f"{which} does not import: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ValueError(
            f"{which} is {point.value!r}, no function that returns a Policy: write MODULE:NAME"
        )
    made: Factory = factory
    return made


def parse_policy(spec: str | Policy | None) -> Policy:
    """Return the policy that ``spec`` names, such as ``"fp16"`` or ``"fp16(static=1024)"``.

    None is float32 with sums as the transport forms them. Raises ValueError for an unknown name
    (with the closest one), an unknown option, or a value out of range.
    """
    if spec is None or isinstance(spec, Policy):
        return spec or NO_POLICY
    if not isinstance(spec, str):
        raise ValueError(f"a precision policy is a name such as 'fp16', or a Policy, not {spec!r}")
    name, options = taken_apart(spec)
    factory = factory_of(name)
    unknown = options.keys() - inspect.signature(factory).parameters.keys()
    if unknown:
        takes = ", ".join(inspect.signature(factory).parameters) or "no options"
        raise ValueError(f"policy {name!r} has no option {sorted(unknown)[0]!r}; it takes {takes}")
    try:
        return factory(**options)
    except TypeError as error:
        raise ValueError(f"policy {spec!r}: {error}") from error


def taken_apart(spec: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a spec; ValueError for what is none."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            values = {k.arg or "": ast.literal_eval(k.value) for k in node.keywords}
            return node.func.id, values
    except (SyntaxError, ValueError, TypeError):  # TypeError: of a list in a set
        pass
    raise ValueError(f"a precision policy reads like 'fp16' or 'fp16(static=1024)', not {spec!r}")
