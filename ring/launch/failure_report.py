"""Why a job failed: which rank did so first, and what made it."""

from __future__ import annotations

import os
import signal
import sys

from ringlet.ring.errors import LOST_PEER
from ringlet.ring.launch.rank_table import Rank, RankTable
from ringlet.ring.launch.start import Started
from ringlet.ring.processes import processes
from ringlet.ring.rendezvous.loss_report import (
    LossReport,
    leaving_code,
    leaving_name,
    loss_report_name,
)
from ringlet.ring.wire.kv_store import KvStore

# Bytes of /dev/shm for a rank: MPICH 5 takes 5.3 MB, and may crash near the end.
MPI_SHARE = 6 << 20


_SHARED = "/dev/shm"


def shared_memory() -> int:
    """Return how large /dev/shm is here, in bytes; without end where there is none."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return sys.maxsize
    return found.f_blocks * found.f_frsize


def may_share() -> bool:
    """Return whether this user may make files in /dev/shm here."""
    return os.access(_SHARED, os.W_OK | os.X_OK)


class FailureReport:
    """Watches the ranks of ``rank_table`` for failures.

    ``kv_store`` holds what ranks have left, ``manager`` is MPI's process manager if there is one.
    ``several`` tells whether ranks are to be named with their hosts, ``mpi`` whether they meet over
    MPI. ``first`` is the rank that
    failed first, ``running`` are those that had not ended when that was known.
    """

    def __init__(
        self, rank_table: RankTable, kv_store: KvStore, several: bool, mpi: bool = False
    ) -> None:
        self.first: Rank | None = None
        self.running: list[Rank] = []
        self.manager: Started | None = None
        self._missed: Rank | None = None
        self._mpi = mpi
        self._rank_table, self._kv_store, self._several = rank_table, kv_store, several

    def reached(self) -> bool:
        """Settle on the rank that failed first; true when that was possible just now."""
        failed = self._rank_table.first_failed(self._leaves) or self._missed
        if self.first is None and failed is not None:
            self.first = failed
            self.running = [rank for rank in self._rank_table.ranks if rank.code is None]
            return True
        return False

    def awaits_cause(self) -> bool:
        """Whether a rank has failed, and ``reached`` has settled on none yet."""
        # By what was settled, not by the clock: time may be up between two looks at it.
        return self.first is None and any(rank.code for rank in self._rank_table.ranks)

    def _leaves(self, rank: Rank) -> bool:
        """Whether a rank has said that it ends, and not because it has lost another one."""
        told = self._kv_store.value(leaving_name(rank.number))
        return told is not None and leaving_code(told) != LOST_PEER

    def missed(self, number: int) -> None:
        """Note a rank that has ended well before MPI_Init, in which others wait for it."""
        self._missed = self._rank_table.ranks[number]

    def explained(self, killed: bool = False) -> bool:
        """Whether all is known about why the first rank failed; ``killed``: or will ever be."""
        if self.first and self.first.lost and self.manager:
            # mpiexec kills all wrappers when one goes or a rank calls MPI_Abort: its code tells.
            ended = self.manager.process.poll() is not None
            return self._rank_table.done and (killed or ended)
        return True

    def aborted(self) -> int | None:
        """Return the code of MPI_Abort if that is how the ranks were lost."""
        if self.first and self.first.lost and self.manager:
            code = self.manager.process.poll()
            return code if code and code > 0 and code != signal.SIGKILL else None
        return None

    def code(self) -> int:
        """Return the exit code of the job, as a shell reports it."""
        if self.first is not None and self.first.code == 0:
            return LOST_PEER  # as those end that lose a rank
        return self.aborted() or processes.shell_code((self.first and self.first.code) or 0)

    def reason(self) -> str:
        """Say why the job failed; empty while it has not."""
        rank = self.first
        if rank is None:
            return ""
        name = self._name(rank)
        if rank.code == LOST_PEER and not rank.lost:
            return self._effect(rank)
        if rank.code == 0:
            return f"{name} exited with code 0 before MPI_Init, in which others wait for it"
        if rank.aborted:
            return f"{name} called MPI_Abort with code {rank.code}"
        if not rank.lost:
            return f"{name} {processes.describe(rank.code or 0)}{self._of_memory(rank)}"
        if (code := self.aborted()) is not None:
            return f"mpiexec ended every rank with code {code}, as after MPI_Abort"
        if rank.broken:
            return f"{name} was killed, as its wrapper could not be believed: {rank.broken}"
        if not rank.here:
            return f"{name} was killed together with its wrapper, or its host cannot be reached"
        return f"{name} was killed together with its wrapper"

    def _of_memory(self, rank: Rank) -> str:
        """Say what ``rank`` may have died of, where MPI or DataLoaders need more of /dev/shm."""
        here = sum(other.here for other in self._rank_table.ranks)
        scarce = rank.here and shared_memory() < (here + 1) * MPI_SHARE
        if rank.code == -signal.SIGBUS or (rank.code == -signal.SIGSEGV and scarce):
            return (
                ", as where /dev/shm is full: make it larger (docker run --shm-size=1g), or take "
                "--transport gloo and fewer DataLoader workers"
            )
        if self._mpi and rank.here and here > 1 and not may_share():
            return (
                "; MPI needs /dev/shm, where this user may not write: let it, or take "
                "--transport gloo"
            )
        return ""

    def _effect(self, rank: Rank) -> str:
        """Say what ``rank``, which failed only because it had lost another one, failed of."""
        how = f"{self._name(rank)} {processes.describe(rank.code or 0)}"
        told = self._loss_reports()
        if left := self._left_early(told):
            return f"{self._name(left)} exited with code 0 while others still needed it, so {how}"
        if text := next((report.text for report in told if report.text), ""):
            return f"{how}, having lost another rank: {text}"
        if running := [str(r.number) for r in self.running]:
            return (
                f"{how}, as one does that has lost another rank; still there: {', '.join(running)}"
            )
        return how

    def _left_early(self, told: list[LossReport]) -> Rank | None:
        """Return the rank that ended first, as if all were done, of those that others have lost."""
        lost = {rank for report in told for rank in report.ranks}
        # Nobody may have been able to tell; when nobody is left, it was one of those without error.
        known = lost or (set() if self.running else set(range(len(self._rank_table.ranks))))
        left = [r for r in self._rank_table.ranks if r.code == 0 and r.number in known]
        return min(left, key=lambda r: r.when, default=None)

    def _loss_reports(self) -> list[LossReport]:
        names = [
            loss_report_name(rank.number)
            for rank in self._rank_table.ranks
            if rank.code == LOST_PEER
        ]
        values = [self._kv_store.value(name) for name in names]
        return [LossReport.unpack(value) for value in values if value is not None]

    def _name(self, rank: Rank) -> str:
        return f"rank {rank.number}" + (f" on {rank.host}" if self._several else "")
