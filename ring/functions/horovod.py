"""The arguments of ``horovod.run`` that ``ringlet.run`` calls otherwise, or has no use for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringlet.ring.callers import no_such_keyword
from ringlet.ring.errors import LaunchError

_COUNTS = {"num_proc": "np", "min_num_proc": "min_np", "max_num_proc": "max_np"}
_RENAMED = (*_COUNTS, "func", "use_gloo", "use_mpi", "network_interfaces", "executable")
_NEEDLESS = ("disable_cache",)  # nothing is remembered of hosts


def translated(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what ``theirs``, Horovod's arguments, stand for: some of ``ours``, and new values.

    ``arguments`` are all that ``run`` has by its own names. Those that say nothing (None, False)
    are left out. Raises TypeError for a name that neither has, LaunchError for what is not there,
    or contradicts another argument.
    """
    known = (*_RENAMED, *_NEEDLESS, "mpi_args")
    for name in theirs:
        if name not in known:
            raise TypeError(no_such_keyword("run", name, [*arguments, *known]))
    said = {name: value for name, value in theirs.items() if value is not None and value != ()}
    if "mpi_args" in said:
        raise LaunchError("mpi_args: set MPI's own variables instead, by env={...}")
    meant = {ours: said[name] for name, ours in _COUNTS.items() if name in said}
    asked = [name for name in ("mpi", "gloo") if said.get(f"use_{name}")]
    if len(asked) == 2:
        raise LaunchError("use_gloo and use_mpi: one of them can be true")
    if asked:
        meant["transport"] = asked[0]
    if interfaces := said.get("network_interfaces"):
        listed = interfaces if isinstance(interfaces, str) else ",".join(interfaces)
        meant["network_interface"] = listed
    for name, value in meant.items():
        if ours[name] not in (None, value):
            raise LaunchError(f"{name}={ours[name]!r} contradicts {name}={value!r}, which"
                              f" {_source(name)} asks for")  # fmt: skip
    return meant | {name: said[name] for name in ("func", "executable") if name in said}


def _source(name: str) -> str:
    renamed = {ours: theirs for theirs, ours in _COUNTS.items()}
    renamed["transport"] = "use_mpi or use_gloo"
    return renamed.get(name, "network_interfaces")
