"""Policies and their registry. Third parties announce theirs in ``ringlet.precision``.

@register_policy("half_head")
def half_head(scale: float = 128.0) -> Policy:
    return Policy("half_head", parameters="float16", scale=StaticScale(scale))
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Any

from ringlet.precision.scaler import DynamicScale, LossScale, NoScale, StaticScale

GROUP = "ringlet.precision"
DTYPES = ("float32", "bfloat16", "float16")
# Norms divide by small numbers, and biases are tiny: neither gains from 16 bits.
KEPT = ("*norm*", "*Norm*", "*.bn*", "bn*", "*.ln*", "ln*")


@dataclass(frozen=True)
class Policy:
    """Dtypes by name, layers that stay in float32, the default wire, and the loss scale.

    ``parameters`` is what the model holds and computes with; the optimizer keeps float32 masters
    where that is a 16-bit type. ``compression`` is the spec used unless the caller names one.
    ``keep`` are patterns of parameter names that stay in float32, beside all norm layers.
    """

    name: str
    parameters: str = "float32"
    compression: str = "none"
    keep: tuple[str, ...] = KEPT
    scale: LossScale = field(default_factory=NoScale)

    def __post_init__(self) -> None:
        if self.parameters not in DTYPES:
            raise ValueError(
                f"policy {self.name!r}: parameters must be one of {', '.join(DTYPES)}, not "
                f"{self.parameters!r}"
            )

    @property
    def masters(self) -> bool:
        """Whether the optimizer works on float32 copies of the parameters."""
        return self.parameters != "float32"

    def keeps(self, name: str) -> bool:
        """Whether the parameter ``name`` stays in float32."""
        return any(fnmatchcase(name, pattern) for pattern in self.keep)


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
    return sorted({*_factories, *(point.name for point in entry_points(group=GROUP))})


def parse_policy(spec: str | Policy | None) -> Policy:
    """Return the policy that ``spec`` names, such as ``"fp16"`` or ``"fp16(static=1024)"``.

    Raises ValueError for an unknown name (with the closest one), an unknown option, or a value
    out of range.
    """
    if spec is None or isinstance(spec, Policy):
        return spec or _fp32()
    name, options = _taken_apart(spec)
    factory = _factories.get(name)
    if factory is None:
        for point in entry_points(group=GROUP, name=name):
            factory = point.load()
    if factory is None:
        known = registered_policies()
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise ValueError(f"unknown precision policy {name!r}; {hint}")
    unknown = options.keys() - inspect.signature(factory).parameters.keys()
    if unknown:
        takes = ", ".join(inspect.signature(factory).parameters) or "no options"
        raise ValueError(f"policy {name!r} has no option {sorted(unknown)[0]!r}; it takes {takes}")
    return factory(**options)


def _taken_apart(spec: str) -> tuple[str, dict[str, Any]]:
    try:
        node = ast.parse(spec.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            values = {k.arg or "": ast.literal_eval(k.value) for k in node.keywords}
            return node.func.id, values
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"a precision policy reads like 'fp16' or 'fp16(static=1024)', not {spec!r}")


@register_policy("fp32")
def _fp32() -> Policy:
    return Policy("fp32")


@register_policy("bf16")
def _bf16(keep: tuple[str, ...] = KEPT) -> Policy:
    return Policy("bf16", "bfloat16", "bf16", tuple(keep))


@register_policy("fp16")
def _fp16(
    static: float | None = None,
    init: float = 65536.0,
    interval: int = 2000,
    keep: tuple[str, ...] = KEPT,
) -> Policy:
    scale = StaticScale(float(static)) if static is not None else None
    chosen = scale or DynamicScale(scale=float(init), interval=interval)
    return Policy("fp16", "float16", "fp16", tuple(keep), chosen)


@register_policy("fp8_wire")
def _fp8_wire(format: str = "e4m3") -> Policy:
    return Policy("fp8_wire", "float32", f"fp8(format={format!r}) | ef")
