"""Objects of a framework with methods added: how optimizers and tapes become distributed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def wrapped(
    original: Any, mixin: type, name: str = "", content: Mapping[str, Any] | None = None
) -> Any:
    """Return a copy of ``original`` that shares its attributes, and whose class adds ``mixin``.

    The class has the name and the documentation of the original's, or ``name`` and ``content``.
    """
    base = type(original)
    inside = {"__doc__": base.__doc__, **(content or {})}
    cls: Any = type(name or base.__name__, (mixin, base), inside)
    made = cls.__new__(cls)
    made.__dict__.update(original.__dict__)
    return made


def refuse_wrapped(optimizer: object, mixins: type | tuple[type, ...]) -> None:
    """Raise ValueError for an optimizer that is distributed already."""
    if isinstance(optimizer, mixins):
        raise ValueError(
            "this optimizer is a DistributedOptimizer already; wrap the original optimizer"
        )
