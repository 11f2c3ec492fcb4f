"""What MPI asks of whoever starts its ranks: PMI 1.1, by which MPICH's ranks find each other.

The launcher answers itself, so no process manager is needed, and nothing listens for the ranks'
questions: they come through each rank's wrapper, over its authenticated link. They are lines of
``name=value``, one command at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from ringlet.ring.errors import ProtocolError

LONGEST = 1 << 14  # bytes of a line
_KEYS, _VALUES = 64, 1024  # characters that a key and a value may have

_MEMORY = Path("/dev/shm")
_FNV_START, _FNV_PRIME = 0x811C9DC5, 0x01000193  # of the hash FNV-1a

Reply = tuple[int, bytes]  # a rank, and the line for it


def aborts(line: bytes) -> bool:
    """Return whether with ``line`` a rank that has called MPI_Abort asks to be ended."""
    return b"cmd=abort" in line.split()


def named_by(reply: bytes) -> str:
    """Return which name ``reply`` tells a rank for the space of its job's values; "" for none."""
    words = dict(word.partition("=")[::2] for word in reply.decode(errors="replace").split())
    return words.get("kvsname", "") if words.get("cmd") == "my_kvsname" else ""


def remove_segments(name: str) -> None:
    """Remove the shared memory that MPICH has named after a job's space, called ``name``.

    Once all ranks have it, they take its name away themselves
    (``ringlet.ring.transports.mpi_segments``). Where one of them ends before, it would stay.
    """
    digest = _FNV_START
    for byte in name.encode(errors="surrogateescape"):
        digest = (digest ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    for path in _MEMORY.glob(f"mpich_shm_{digest:x}_*"):
        with contextlib.suppress(OSError):  # another rank's wrapper was faster
            if path.lstat().st_uid == os.getuid():
                path.unlink()


def _mapping(nodes: Sequence[int]) -> str:
    """Return which ranks share a host: runs of hosts with as many ranks, (first, hosts, ranks)."""
    blocks, first = "", 0
    for count, alike in groupby(nodes):
        hosts = len(list(alike))
        blocks += f",({first},{hosts},{count})"
        first += hosts
    return f"(vector{blocks})"


class Pmi:
    """Answers the ranks of one job; ``nodes`` says how many of them each host has, in order."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.size = sum(nodes)
        # Of the one space that values are kept in. MPI names shared memory after it, so no other
        # job, nor one that ended in the middle, may have had it.
        self.name = f"ringlet_{secrets.token_hex(16)}"
        self._values: dict[str, str] = {}
        if len(mapping := _mapping(nodes)) < _VALUES:  # else MPI compares names of hosts
            self._values["PMI_process_mapping"] = mapping
        self.aborted: dict[int, int] = {}  # the code that a rank has called MPI_Abort with
        self._begun: set[int] = set()  # ranks that have called MPI_Init
        self._held_back: list[int] = []  # those of them that have no answer yet
        self._waiting: set[int] = set()  # ranks in the barrier
        self._spawning: set[int] = set()  # ranks that are in the middle of a longer command

    def take(self, rank: int, line: bytes) -> list[Reply]:
        """Return the answers to a line of ``rank``. Raises ProtocolError for one that is none."""
        text = line.decode(errors="surrogateescape").strip()
        if text.startswith("mcmd="):
            self._spawning.add(rank)
        if rank in self._spawning:
            if text != "endcmd":
                return []
            self._spawning.discard(rank)
            return [(rank, b"cmd=spawn_result rc=-1 msg=not_supported\n")]
        words = dict(word.partition("=")[::2] for word in text.split())
        command = words.get("cmd", "")
        if command == "barrier_in":
            return self._barrier(rank)
        if command == "abort":
            code = words.get("exitcode", "")
            # A job that was aborted has failed, whatever the code.
            self.aborted[rank] = int(code) & 0xFF or 1 if code.isdecimal() else 1
            return []
        if command == "init":
            return self._init(rank)
        answer = self._answer(command, words)
        return [(rank, answer.encode(errors="surrogateescape") + b"\n")]

    def waits_in_vain(self, ended: Collection[int]) -> list[int]:
        """Return which of the ranks that have ``ended`` others wait for in MPI_Init.

        These have not called it, and it returns on no rank before all have.
        """
        return sorted(set(ended) - self._begun) if self._begun else []

    def _init(self, rank: int) -> list[Reply]:
        """Answer when all ranks have begun: MPI would wait for them by turning in circles.

        It took a core from those that still import what they need.
        """
        self._begun.add(rank)
        self._held_back.append(rank)
        if len(self._begun) < self.size:
            return []
        begin, self._held_back = self._held_back, []
        line = b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"
        return [(each, line) for each in begin]

    def _barrier(self, rank: int) -> list[Reply]:
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return []
        self._waiting.clear()
        return [(other, b"cmd=barrier_out rc=0\n") for other in range(self.size)]

    def _answer(self, command: str, words: dict[str, str]) -> str:
        if command == "get_maxes":
            return f"cmd=maxes kvsname_max=256 keylen_max={_KEYS} vallen_max={_VALUES}"
        if command == "get_appnum":
            return "cmd=appnum appnum=0"
        if command == "get_my_kvsname":
            return f"cmd=my_kvsname kvsname={self.name}"
        if command == "get_universe_size":
            return f"cmd=universe_size size={self.size}"
        if command == "put":
            self._values[words.get("key", "")] = words.get("value", "")
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            value = self._values.get(words.get("key", ""))
            if value is None:
                return "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            return f"cmd=get_result rc=0 msg=success value={value}"
        if command == "finalize":
            return "cmd=finalize_ack rc=0"
        if command.isidentifier():  # of another version, maybe: MPI itself says what it lacks
            return f"cmd={command.removesuffix('_name')}_result rc=-1 msg=not_supported"
        raise ProtocolError(f"MPI asks for {command[:40]!r}, which is no command of PMI 1")
