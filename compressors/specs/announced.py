"""What installed packages announce in an entry-point group, however damaged one of them may be."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata


def announced(group: str) -> tuple[Sequence[metadata.EntryPoint], list[str]]:
    """Return the entry points of a ``group``, and what to say of packages that cannot be read.

    One of these is no reason not to find what the others offer.
    """
    try:
        return tuple(metadata.entry_points(group=group)), []
    except Exception:  # whatever its files make importlib raise; it does not say which package
        found: dict[tuple[str, str], metadata.EntryPoint] = {}
        damaged = []
        for package in metadata.distributions():
            try:
                for entry in package.entry_points:
                    if entry.group == group:
                        found.setdefault((entry.name, entry.value), entry)
            except Exception as error:
                damaged.append(
                    f"The entry points of the package {_name(package)} cannot be read "
                    f"({type(error).__name__}: {error}): install it anew"
                )
        return tuple(found.values()), damaged


def rivals(entries: Sequence[metadata.EntryPoint]) -> str:
    """Return who offers what, where ``entries`` of one name are of different things; else ""."""
    if len({entry.value for entry in entries}) < 2:
        return ""
    return " and ".join(f"{each.value} (from {origin(each)})" for each in entries)


def origin(entry: metadata.EntryPoint) -> str:
    """Return the name of the package that announces ``entry``."""
    return "unknown" if entry.dist is None else _name(entry.dist)


def _name(package: metadata.Distribution) -> str:
    """Return the name of a package, or the folder of one that tells none."""
    try:
        name = package.name
    except Exception:  # its METADATA is damaged
        name = ""
    return name or str(getattr(package, "_path", "unknown"))
