"""How long a job may take to start, or have too few ranks, where no argument says it."""

from __future__ import annotations

import os
from typing import overload

from ringlet.ring.errors import LaunchError
from ringlet.ring.variables import given, read_number, read_time


@overload
def time_limit(argument: str) -> float | None: ...
@overload
def time_limit(argument: str, default: float) -> float: ...
def time_limit(argument: str, default: float | None = None) -> float | None:
    """Return the seconds that a variable gives for ``start_timeout`` or ``elastic_timeout``.

    ``default`` where it is not set, or empty. Raises LaunchError naming it where it says something
    else.
    """
    variable, text = given(os.environ, argument.upper()) or ("", "")
    if not text:
        return default
    read = read_time if argument == "start_timeout" else read_number
    try:
        return read(variable, text)
    except ValueError as error:
        raise LaunchError(str(error)) from None
