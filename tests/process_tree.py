"""What a program that does not end in time is doing: its processes, told before they are killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A process as Linux tells of it."""

    pid: int
    parent: int
    state: str  # R, S, D, T (stopped), Z (ended, and nobody has asked how)
    computed: float  # seconds, in the program and in the kernel
    age: float  # seconds
    waits_in: str  # a function of the kernel
    command: str


def processes_of(pid: int) -> list[Process]:
    """Return process ``pid`` and all that descend from it, parents first; none if it has gone."""
    everything = list(_all())
    found = [process for process in everything if process.pid == pid]
    for process in found:  # which grows
        found += [other for other in everything if other.parent == process.pid]
    return found


def _all() -> Iterator[Process]:
    now = float(Path("/proc/uptime").read_text().split()[0])
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended meanwhile
            # pid (name) state parent ...; the name may hold blanks and parentheses itself
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            user, system, began = (int(fields[i]) / TICKS for i in (11, 12, 19))
            yield Process(
                int(entry.name),
                int(fields[1]),
                fields[0],
                user + system,
                now - began,
                (entry / "wchan").read_text(),
                (entry / "cmdline").read_text().replace("\0", " ").strip(),
            )


def tell(pid: int) -> str:
    """Return a line for each process of ``processes_of(pid)``, and how busy the machine is."""
    lines = [
        f"{p.pid:>7} of {p.parent:<7} {p.state}, {p.age:.1f} s old, computed {p.computed:.2f} s, "
        f"waits in {p.waits_in}: {p.command[-160:]}"
        for p in processes_of(pid)
    ]
    load = Path("/proc/loadavg").read_text().strip()
    return "\n".join([f"Load: {load}. Processes of {pid}:", *lines])
