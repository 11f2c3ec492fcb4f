"""Output that could not be written, because a disk is full, say: how much, where, and why."""

from __future__ import annotations


class Losses:
    """What was dropped, by place. The job goes on without it."""

    def __init__(self) -> None:
        self._dropped: dict[str, int] = {}

    def add(self, place: str, nbytes: int, error: OSError) -> str:
        """Count bytes that ``place`` did not take; return what to say of it, once for a place."""
        known = place in self._dropped
        self._dropped[place] = self._dropped.get(place, 0) + nbytes
        why = error.strerror or str(error)
        return "" if known else f"{place}: {why}; what cannot be written there is dropped"

    def summary(self) -> str:
        """Return how much was dropped; empty if nothing was."""
        listed = ", ".join(
            f"{nbytes or 'some'} bytes for {place}" for place, nbytes in self._dropped.items()
        )
        return listed and f"output was dropped: {listed}"
