"""What a user allows an elastic job: how many ranks, how often, how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from ringlet.ring.errors import LaunchError

TIMEOUT = 600.0  # seconds


def flag(name: str) -> str:
    """Return the flag of ``ringlet run`` that an argument of ``checked_rules`` comes from."""
    special = {"np": "-np", "cooldown_range": "--blacklist-cooldown-range"}
    return special.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class Rules:
    """What the user allows.

    ``np`` ranks are waited for at the start, at least ``min_np`` later; ``max_np`` is the most.
    ``reset_limit`` says how often ranks may be numbered anew. ``timeout`` is how long, in seconds,
    there may be too few. A host whose rank fails is not used any more, or, with a ``cooldown``
    (least and most seconds), not for a while that doubles each time. ``named`` returns what the
    user calls one of these, and some others.
    """

    np: int
    min_np: int
    max_np: int | None = None
    reset_limit: int | None = None
    timeout: float = TIMEOUT
    cooldown: tuple[float, float] | None = None
    fixed: bool = False  # whether no other hosts can be found
    named: Callable[[str], str] = field(default=flag, compare=False)


def checked_rules(
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    reset_limit: int | None = None,
    elastic_timeout: float | None = None,
    cooldown_range: Sequence[float] | None = None,
    known: int | None = None,
    named: Callable[[str], str] = str,
) -> Rules:
    """Return the rules that the arguments state; None says nothing.

    ``known`` is how many slots there are, None where they are looked for again and again. Raises
    LaunchError, in which an argument is called what ``named`` returns for it.
    """
    for name, value, least in (("np", np, 1), ("min_np", min_np, 1), ("max_np", max_np, 1),
                               ("reset_limit", reset_limit, 0)):  # fmt: skip
        whole_number(value, named(name), least)
    start = np or min_np or known
    if not start:
        raise LaunchError(
            f"an elastic job needs {named('np')} or {named('min_np')}: how many ranks to begin"
            " with?"
        )
    fewest = min_np or start
    if start < fewest:
        raise LaunchError(f"{named('min_np')} {fewest} is more than {named('np')} {start}")
    if max_np is not None and max_np < start:
        told = named("np") if np else named("min_np")
        most = f"{told} {start} is" if np or min_np else f"the hosts have {start} slots, which is"
        raise LaunchError(f"{most} more than {named('max_np')} {max_np}")
    timeout = _seconds(elastic_timeout, named("elastic_timeout"))
    cooldown = None
    if cooldown_range is not None:
        name = named("cooldown_range")
        if not isinstance(cooldown_range, Sequence) or len(cooldown_range) != 2:
            raise LaunchError(f"{name} takes two numbers of seconds, not {cooldown_range!r}")
        low, high = (_seconds(value, name) for value in cooldown_range)
        if not 0 < low <= high:
            raise LaunchError(
                f"{name} takes two numbers of seconds, the least first, not {low:g} {high:g}"
            )
        cooldown = low, high
    fixed = known is not None
    return Rules(start, fewest, max_np, reset_limit, timeout, cooldown, fixed, named)


def whole_number(value: object, name: str, least: int) -> None:
    """Raise LaunchError unless ``value`` is None, or a whole number of at least ``least``."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (whole and value >= least):  # type: ignore[operator]
        raise LaunchError(f"{name} takes a number of at least {least}, not {value!r}")


def _seconds(value: float | None, name: str) -> float:
    if value is None:
        return TIMEOUT
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise LaunchError(f"{name} takes a number of seconds, not {value!r}")
    return seconds
