"""Objects of a framework with methods added: how optimizers and tapes become distributed ones."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import Any

# Of each optimizer what it was wrapped as last: whoever wraps it again takes over from that.
_made: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_NOTHING = object()


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


class Original:
    """What ``wrapped`` was given, and its attributes at that time; ``spared`` are none of it."""

    def __init__(self, original: Any, spared: Container[str] = ("name",)) -> None:
        self._original, self._given, self._spared = original, dict(vars(original)), spared

    def take_back(self, made: Any) -> None:
        """Give the original what ``made`` has set since, such as momenta, and it has not itself."""
        own = vars(self._original)
        for key, value in vars(made).items():
            given = self._given.get(key, _NOTHING)
            changed = value is not given and own.get(key, _NOTHING) is given
            if changed and key not in self._spared and not key.startswith("_ringlet"):
                own[key] = value


def last_made(original: Any) -> Any:
    """Return the optimizer that ``original`` was wrapped as last, if it is still there."""
    found = _made.get(_innermost(original))
    return None if found is None else found()


def note_made(original: Any, made: Any) -> None:
    """Let ``last_made`` return ``made`` from now on."""
    _made[_innermost(original)] = weakref.ref(made)


def _innermost(optimizer: Any) -> Any:
    """Return an optimizer, or the one in it, such as one in another that has a loss scale."""
    return getattr(optimizer, "inner_optimizer", optimizer)
