"""What to do where a program imports Horovod, for which Ringlet can stand in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_IMPORTS = re.compile(rb"^\s*(?:import|from)\s+horovod\b", re.MULTILINE)
_READ = 1 << 20  # bytes of a script


def horovod_hint(command: Sequence[str]) -> str | None:
    """Return how to start ``command`` if its script imports Horovod, which is not installed here.

    None for anything else. A script that cannot be read says nothing.
    """
    if "ringlet.as_horovod" in command or find_spec("horovod") is not None:
        return None
    script = next((word for word in command[1:] if word.endswith(".py")), None)
    if script is None:
        return None
    try:
        with Path(script).open("rb") as file:
            found = _IMPORTS.search(file.read(_READ))
    except OSError:
        return None
    if found is None:
        return None
    return (
        f"{script} imports horovod, which is not installed, and Ringlet can stand in for it: start "
        f"python -m ringlet.as_horovod {script}"
    )
