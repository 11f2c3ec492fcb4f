"""What compression held back on ranks that are gone: lost, or with another rank now."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from ringlet.ring.rendezvous import epochs
from ringlet.ring.wire.kv_store import KvStore


class HeldBack:
    """Says it for the launcher, from what programs leave in ``kv_store``."""

    def __init__(self, kv_store: KvStore) -> None:
        self._kv_store = kv_store
        self._gone: dict[int, tuple[int, int]] = {}  # by member: its last rank, and in which epoch
        self._counted: set[int] = set()  # the members among them that were looked at
        # Of whom another may have a copy, by member: its rank, the norm, and the epoch.
        self._missing: dict[int, tuple[int, float, int]] = {}
        self._settled = 0  # up to which epoch,
        self._told: set[int] = set()  # and what was told of it, by member

    def gone(self, member: int, rank: int, epoch: int) -> None:
        """Note that a member failed, or was sent away, which had ``rank`` last, in ``epoch``."""
        self._gone[member] = rank, epoch

    def notes(self, failed: bool) -> Iterator[str]:
        """Return what there is to say by now; nothing of members that go as the job has failed."""
        fresh = [member for member in self._gone if member not in self._counted]
        self._counted.update(fresh)
        for member in () if failed else fresh:
            yield from self._count_lost(member, *self._gone[member])
        yield from self._look_at_taken()

    def _count_lost(self, member: int, rank: int, epoch: int) -> Iterator[str]:
        """Say what is lost of gradients with a member that had committed, unless there is a copy.

        Then the ranks that are left say who has it, or have said so: a member that is sent away
        may be slower than they are.
        """
        told = self._kv_store.value(epochs.held_name(member))
        try:
            norm, copied = json.loads(told or b"[0, false]")
            norm = float(norm)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return  # no program of ours says so
        if norm > 0 and math.isfinite(norm):
            if copied and epoch >= self._settled:
                self._missing[member] = rank, norm, epoch
            elif member not in self._told:
                yield _lost(rank, norm)

    def _look_at_taken(self) -> Iterator[str]:
        """Say what became of what was held back by ranks that are gone, once others have told."""
        told = self._kv_store.value(epochs.TAKEN)
        try:
            epoch, taken = json.loads(told or b"[0, []]")
            if int(epoch) <= self._settled:
                return
            entries = {int(each[0]): [float(value) for value in each[1:]] for each in taken}
            notes = [
                f"what compression held back on rank {rank:.0f} of before goes on with rank "
                f"{now:.0f} of now: gradients of norm {norm:.3g}{_aged(age)}"
                for member, (rank, norm, age, now) in entries.items()
                if member not in self._told and norm > 0
            ]
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            return  # no program of ours says so
        self._settled = int(epoch)
        self._told |= entries.keys()
        yield from notes
        for member, (rank, norm, lost_in) in list(self._missing.items()):
            if lost_in < self._settled:
                del self._missing[member]
                if member not in entries:
                    yield _lost(rank, norm)


def _lost(rank: int, norm: float) -> str:
    return (
        f"what compression held back on rank {rank} is lost: gradients of norm {norm:.3g}, at its "
        "last commit"
    )


def _aged(steps: float) -> str:
    """Return in words how many steps older a copy is than what ranks go on with."""
    if steps == 0:
        return ""
    return f", {steps:.0f} steps old" if steps > 0 else f", {-steps:.0f} steps ahead"
