"""How far long work has come: a bar on a terminal, a line for each piece of work in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_WIDTH = 24  # characters of the bar


class Progress:
    """Counts ``total`` pieces of work on ``stream`` (None: the standard error).

    On a terminal one line is drawn again and again, and wiped out in the end. Elsewhere each piece
    is a line of its own, with the seconds since the beginning.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total, self._stream = total, stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._done = 0
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.wipe()

    def begin(self, what: str) -> None:
        """Say that work on ``what`` begins."""
        if self._terminal:
            full = _WIDTH * self._done // max(1, self._total)
            bar = "#" * full + "." * (_WIDTH - full)
            line = f"[{bar}] {self._done}/{self._total} {what[:48]}"
            # A line that is as long as the terminal would begin another one.
            self._put(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        else:
            took = time.monotonic() - self._began
            self._put(f"{self._done + 1}/{self._total} {what} ({took:.1f} s)\n")

    def end(self) -> None:
        """Say that what was begun last is done."""
        self._done += 1

    @property
    def finished(self) -> bool:
        """Whether all pieces are done."""
        return self._done >= self._total

    def wipe(self) -> None:
        """Leave the line of the bar empty, for something else to be printed there."""
        if self._terminal:
            self._put("\r\x1b[K")

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
