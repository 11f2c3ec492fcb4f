"""Settings of an optimizer that ranks must have in common, as plain numbers and words."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

# What ranks may call otherwise; what they decide for themselves; and what a broadcast makes alike.
_OWN = frozenset({"name", "module", "registered_name", "build_config", "jit_compile"})
_RATES = frozenset({"learning_rate", "lr"})


def of_config(optimizer: Any) -> dict[str, object]:
    """Return what ``optimizer.get_config()`` tells, by name: numbers and words.

    Those of an optimizer inside, and of a schedule, too. A learning rate that is a number is not
    among them: callbacks change it, and a broadcast makes it alike.
    """
    try:
        config = optimizer.get_config()
    except Exception:  # one of the user's own need not have any
        return {}
    return dict(_plain(config, ""))


def of_attributes(optimizer: Any, spared: Container[str] = ()) -> dict[str, object]:
    """Return the numbers among the attributes of ``optimizer`` that are not ``spared``."""
    return {
        name.strip("_"): _number(value)
        for name, value in sorted(vars(optimizer).items())
        if isinstance(value, int | float | np.number) and name not in spared
    }


def _plain(config: Mapping[str, Any], before: str) -> Iterator[tuple[str, object]]:
    if config.get("class_name") == "__lambda__":
        return  # Keras tells its code, and so in which folder of a host its file is
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            yield from _plain(value, before if key == "config" else f"{before}{key} ")
        elif key in _OWN or key in _RATES:
            continue
        elif isinstance(value, bool | str | None):
            yield f"{before}{key}", value
        elif isinstance(value, int | float | np.number):
            yield f"{before}{key}", _number(value)
        elif isinstance(value, list | tuple):
            yield from _plain({str(i): each for i, each in enumerate(value)}, f"{before}{key} ")


def _number(value: Any) -> object:
    # As a variable has it: on one rank it may have been loaded.
    return value if isinstance(value, bool) else float(str(np.float32(value)))
