"""What ``ringlet.run`` is called with: each argument is named that is of the wrong form."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ringlet.ring.elastic.rules import whole_number
from ringlet.ring.errors import LaunchError


def check_arguments(
    args: Any,
    kwargs: Any,
    np: Any,
    hosts: Any,
    hostfile: Any,
    env: Any,
    start_timeout: Any,
) -> None:
    """Raise TypeError for what cannot be a function's arguments, LaunchError for the others."""
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        hint = f"; for ranks write np={args}" if type(args) is int else ""
        raise TypeError(f"args is a tuple of the function's arguments, not {args!r}{hint}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a dict of the function's arguments by name, not {kwargs!r}")
    whole_number(np, "np", 1)
    if hosts is not None and not isinstance(hosts, str):
        raise LaunchError(f"hosts is a text such as 'host1:4,host2:4', not {hosts!r}")
    if hostfile is not None and not isinstance(hostfile, str | os.PathLike):
        raise LaunchError(f"hostfile is the path of a file, not {hostfile!r}")
    if start_timeout is not None and not _is_time(start_timeout):
        raise LaunchError(f"start_timeout takes a number of seconds, not {start_timeout!r}")
    if env is not None and not isinstance(env, Mapping):
        raise LaunchError(f"env is a dict of names and texts, not {env!r}")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise LaunchError(f"env: {name!r} is no name of a variable")
        if not isinstance(value, str):
            raise LaunchError(f"env: {name} is a text, such as {str(value)!r}, not {value!r}")
        if "\0" in value:
            raise LaunchError(f"env: {name} is {value!r}, and no variable can hold a NUL byte")


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0
