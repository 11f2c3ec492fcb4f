"""What applies a policy to models of a framework: its adapter, which registers itself here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple

_FRAMEWORKS = ("keras", "torch")  # a Keras layer may be a torch module as well

Give = Callable[[Any, Any], bool]  # model, policy; whether the model is of this framework
Autocast = Callable[[str, str | None], AbstractContextManager[Any]]  # dtype by name, device


class Applier(NamedTuple):
    """How one framework's models get a policy, and how code beside them computes in its dtype."""

    give: Give
    autocast: Autocast | None = None


_appliers: dict[str, Applier] = {}


def register_applier(framework: str, applier: Applier) -> None:
    """Let ``applier`` serve the models of ``framework``, by the name of its package."""
    _appliers[framework] = applier


def apply(model: Any, policy: Any) -> bool:
    """Give ``model`` a policy in place; whether an adapter knows such models."""
    families = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    return any(_applier(name).give(model, policy) for name in _FRAMEWORKS if name in families)


def autocast(dtype: str, device: str | None) -> AbstractContextManager[Any]:
    """Return torch's autocast to ``dtype`` on ``device``, by default an accelerator's."""
    make = _applier("torch").autocast
    assert make is not None
    return make(dtype, device)


def _applier(framework: str) -> Applier:
    if framework not in _appliers:
        import_module(f"ringlet.{framework}")  # the adapter, which registers
    return _appliers[framework]
