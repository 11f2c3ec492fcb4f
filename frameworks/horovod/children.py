"""Children that multiprocessing starts afresh import Horovod's names, as those that it forks do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from multiprocessing import util
from typing import Any

# What spawned children and the fork server run, which both may import the main script.
_STARTS = ("from multiprocessing.spawn ", "from multiprocessing.forkserver ")


@functools.cache
def inherit() -> None:
    """Let what multiprocessing starts from this process install the aliases before all else.

    Nothing is said in the environment: other programs that are started see a Horovod that is there.
    """
    start: Any = util.spawnv_passfds

    @functools.wraps(start)
    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Any) -> Any:
        return start(path, with_aliases(args), passfds)

    util.spawnv_passfds = spawnv_passfds


def with_aliases(command: Sequence[Any]) -> list[Any]:
    """Return the command of a child of multiprocessing's with the aliases; others as they are."""
    words = list(command)
    code = words.index("-c") + 1 if "-c" in words else 0
    if code and words[code].startswith(_STARTS):
        path = [entry for entry in sys.path if isinstance(entry, str)]  # as the child has it later
        first = f"import sys; sys.path[:0] = {path}; import ringlet; ringlet.install_as_horovod()"
        words[code] = f"{first}; {words[code]}"
    return words
