"""The hosts of a batch system's allocation: what Slurm, LSF and Grid Engine say of theirs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host, parse_host

_SPECIAL_STEPS = 0xFFFFFFF0  # Slurm numbers the batch, extern and interactive steps from here up
_MOST = 1 << 16  # hosts of a job
_SHELL = [sys.executable, "-P", "-m", "ringlet.ring.hosts.batch_shell"]


@dataclass(frozen=True)
class Allocated:
    """Hosts, the variable that says so, and the remote shell that reaches them as a command."""

    hosts: tuple[Host, ...]
    source: str
    shell: tuple[str, ...]


def allocated(env: Mapping[str, str]) -> Allocated | None:
    """Return the hosts of the batch job that ``env`` is of, None outside of one.

    A task of a Slurm step is outside: it is one process of several, and its hosts are not its own.
    Raises LaunchError, naming the variable, for what cannot be read.
    """
    if "SLURM_JOB_ID" in env and "SLURM_JOB_NODELIST" in env and not _in_step(env):
        names = expand(env["SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST")
        counts = _counts(env, len(names))
        hosts = tuple(map(Host, names, counts))
        return Allocated(hosts, "SLURM_TASKS_PER_NODE", (*_SHELL, "slurm"))
    if words := env.get("LSB_MCPU_HOSTS", "").split():
        if len(words) % 2:
            raise LaunchError(f"LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS']!r} is not `host slots ...`")
        pairs = [f"{name}:{count}" for name, count in zip(words[::2], words[1::2], strict=True)]
        return Allocated(_added(pairs, "LSB_MCPU_HOSTS"), "LSB_MCPU_HOSTS", (*_SHELL, "lsf"))
    if path := env.get("PE_HOSTFILE"):
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"PE_HOSTFILE={path} cannot be read: {error}") from error
        pairs = [":".join(words[:2]) for line in lines if (words := line.split())]
        return Allocated(_added(pairs, "PE_HOSTFILE"), "PE_HOSTFILE", (*_SHELL, "sge"))
    return None


def expand(nodes: str, source: str) -> list[str]:
    """Return the hosts of a Slurm node list such as ``gpu[007-009,12],login1``.

    Raises LaunchError, naming the variable ``source``, for what is none.
    """
    found: list[str] = []
    whole = re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", nodes)
    for piece in re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", nodes) if whole else ():
        names = [""]
        for text, inside in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", piece):
            ends = [text] if text else _numbers(inside)
            if len(found) + len(names) * len(ends) > _MOST:
                raise LaunchError(f"{source} names more than {_MOST} hosts: give -H or --hostfile")
            names = [name + end for name in names for end in ends]
        found += names
    if not found or any(not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", name) for name in found):
        raise LaunchError(f"{source}={nodes!r} is not a Slurm node list: give -H or --hostfile")
    return found


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for span in text.split(","):
        first, dash, last = span.partition("-")
        if not all(
            re.fullmatch("[0-9]{1,9}", end) for end in ((first, last) if dash else (first,))
        ):
            return ["["]  # which no name has
        numbers = range(int(first), int(last or first) + 1)
        found += [str(i).zfill(len(first)) for i in numbers[: _MOST + 1]]
    return found


def _counts(env: Mapping[str, str], hosts: int) -> list[int]:
    name = "SLURM_TASKS_PER_NODE"
    text = env.get(name, f"1(x{hosts})")
    counts: list[int] = []
    for piece in text.split(","):
        given = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", piece)
        if given is None:
            raise LaunchError(f"{name}={text!r} is not like 4(x2),1: give -H or --hostfile")
        counts += [int(given[1])] * int(given[2] or 1)
    if len(counts) != hosts:
        raise LaunchError(f"{name}={text!r} is of {len(counts)} hosts, but there are {hosts}")
    return counts


def _added(pairs: list[str], source: str) -> tuple[Host, ...]:
    """Return hosts with all their slots: one may be named several times."""
    slots: dict[str, int] = {}
    for host in (parse_host(pair, source) for pair in pairs):
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _in_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return "SLURM_PROCID" in env and step.isdecimal() and int(step) < _SPECIAL_STEPS
