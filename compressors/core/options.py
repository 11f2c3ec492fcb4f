"""Hyper-parameters of compressors: named, defaulted, validated.

A plain class attribute with a default (``ratio: float = 0.01``) is an option already; ``option``
adds a range, choices and a line of documentation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from ringlet.compressors.core.errors import OptionError, did_you_mean


def option(
    default: Any,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: Sequence[Any] | None = None,
    doc: str = "",
) -> Any:
    """Declare an option with a ``default``, optional bounds or ``choices``, and a line on it."""
    limits = {"gt": gt, "ge": ge, "lt": lt, "le": le, "choices": choices, "doc": doc}
    return dataclasses.field(default=default, metadata=limits)


def wrapped() -> Any:
    """Declare the compressor that a modifier wraps: a field, but no option of the spec."""
    return dataclasses.field(default=None, metadata={"wrapped": True})


def fixed(value: Any) -> Any:
    """Pin a field that a base class has as an option: it is no option of the spec any more."""
    return dataclasses.field(default=value, metadata={"fixed": True})


_known: WeakKeyDictionary[type, Mapping[str, dataclasses.Field[Any]]] = WeakKeyDictionary()


def options_of(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    """Return the options of a compressor class by name, in order of declaration."""
    found = _known.get(cls)
    if found is None:
        found = _known[cls] = MappingProxyType(
            {
                field.name: field
                for field in dataclasses.fields(cls)
                if not {"wrapped", "fixed"} & field.metadata.keys()
            }
        )
    return found


def describe_options(cls: type) -> str:
    """Return ``"ratio=0.01, exact=True"``, or ``"none"``."""
    return ", ".join(f"{n}={f.default!r}" for n, f in options_of(cls).items()) or "none"


def bind_options(
    cls: type, label: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Match positional and keyword arguments with the options of ``cls``.

    Raises OptionError naming the options when there are too many, unknown or repeated ones.
    """
    names = list(options_of(cls))
    if len(args) > len(names):
        raise OptionError(
            f"{label} got {len(args)} options, it has {len(names)}: {describe_options(cls)}"
        )
    bound = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            hint = did_you_mean(name, names) or "."
            plain = getattr(cls, name, None)
            # Ringlet's own classes have constants, which no user makes options of.
            own = cls.__module__.partition(".")[0] == "ringlet"
            if not own and isinstance(plain, (bool, int, float, str)):
                kind = type(plain).__name__
                hint = f", for one has a type: write {name}: {kind} = {plain!r} in the class."
            raise OptionError(
                f"{label} has no option {name!r}{hint} Options: {describe_options(cls)}"
            )
        if name in bound:
            raise OptionError(f"{label} got option {name!r} twice")
        bound[name] = value
    return bound


def checked(label: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """Return ``value`` in the type of the option's default, or raise OptionError."""
    default, limits = field.default, field.metadata
    wanted = type(default)
    if wanted is float and type(value) is int:
        value = float(value)
    if default is not None and type(value) is not wanted:
        raise OptionError(
            f"{label}: {field.name} must be {wanted.__name__}, "
            f"got {value!r} ({type(value).__name__})"
        )
    choices = limits.get("choices")
    if choices is not None and value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        own = ", which is its own default" if value == default else ""
        raise OptionError(f"{label}: {field.name} must be one of {listed}; got {value!r}{own}")
    if isinstance(value, float) and math.isinf(value) and value != default:  # none can be written
        raise OptionError(f"{label}: {field.name} must be finite, got {value!r}")
    try:
        fits = value is None or _within(value, limits)
    except TypeError:  # of another type than the ends of the range, where the default is None
        fits = False
    if not fits:
        own = ", which is its own default" if value == default else ""
        raise OptionError(f"{label}: {field.name} must be {_range(limits)}, got {value!r}{own}")
    return value


def _within(value: Any, limits: Any) -> bool:
    # Written so that NaN, for which every comparison is false, is outside every range.
    return (
        (limits.get("gt") is None or value > limits["gt"])
        and (limits.get("ge") is None or value >= limits["ge"])
        and (limits.get("lt") is None or value < limits["lt"])
        and (limits.get("le") is None or value <= limits["le"])
    )


def _range(limits: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(
        f"{sign} {limits[key]:g}" for key, sign in signs.items() if limits.get(key) is not None
    )
