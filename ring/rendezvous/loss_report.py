"""What a rank that has lost others leaves in the store before it ends: which ones, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass

_LONGEST = 400  # characters of the reason


@dataclass(frozen=True)
class LossReport:
    """The ranks that were lost, as far as the one that lost them knows, and its error's text."""

    ranks: tuple[int, ...] = ()
    text: str = ""

    def pack(self) -> bytes:
        """Return this as a value for the store."""
        cause = self.text.partition("\n\n")[0]  # what follows says where it was, not what
        return json.dumps([self.ranks, cause[:_LONGEST]]).encode()

    @classmethod
    def unpack(cls, value: bytes) -> LossReport:
        """Return what was packed; one that says nothing if ``value`` makes no sense."""
        try:
            ranks, text = json.loads(value)
            return cls(tuple(map(int, ranks)), " ".join(str(text).split()))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return cls()


def loss_report_name(rank: int) -> str:
    """Return the name in the store under which rank ``rank`` leaves its report."""
    return f"lost-{rank}"
