"""Ranks that end well before they have come to where the others wait for them, in ``init``."""

from __future__ import annotations

import re
from collections.abc import Collection

from ringlet.ring.launch.failure_report import FailureReport
from ringlet.ring.launch.rank_table import RankTable
from ringlet.ring.processes.pmi import Pmi
from ringlet.ring.wire.kv_store import KvStore

# Where all ranks meet over gloo (ringlet.ring.transports.gloo_proof): what is set once all are
# there, beside a name for each that is.
_MEETING = re.compile(r"(ringlet/[0-9]+/ringlet-gloo/proof/)all here")


class Absence:
    """Sees that nobody waits for ranks of ``rank_table`` that cannot come any more.

    Over gloo those who wait learn it from ``kv_store``. MPI cannot be told: there ``failure`` is,
    by what ``pmi`` knows.
    """

    def __init__(
        self, rank_table: RankTable, kv_store: KvStore, pmi: Pmi | None, failure: FailureReport
    ) -> None:
        self._rank_table, self._kv_store = rank_table, kv_store
        self._pmi, self._failure = pmi, failure

    def look(self) -> None:
        """Look whether somebody waits in vain."""
        ended = [rank.number for rank in self._rank_table.ranks if rank.done and rank.code == 0]
        if not ended:
            return
        if self._pmi is not None and (absent := self._pmi.waits_in_vain(ended)):
            self._failure.missed(absent[0])
        for name in self._kv_store.awaited():
            if absent := self._absent(name, ended):
                why = f"{_ranks(absent)} ended before reaching init(), which every rank has to call"
                self._kv_store.refuse(name, why)

    def _absent(self, name: str, ended: Collection[int]) -> list[int]:
        found = _MEETING.fullmatch(name)
        if found is None:
            return []
        return [rank for rank in ended if self._kv_store.value(f"{found[1]}here {rank}") is None]


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
