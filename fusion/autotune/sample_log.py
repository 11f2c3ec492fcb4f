"""The autotuner's log: a CSV file with a column for each limit that can be tuned."""

from __future__ import annotations

import csv
import logging
import os
from contextlib import suppress
from typing import Any

from ringlet.ring.rendezvous.epochs import present
from ringlet.ring.safe_files import create_text, refuse_others

log = logging.getLogger("ringlet")

COLUMNS = [
    "sample", "cycle_time_ms", "fusion_threshold", "streams", "cache", "hierarchical",
    "score_bytes_per_s",
]  # fmt: skip


class Log:
    """A CSV of what was tried, at ``path`` unless that is empty.

    The line with sample 0 is what was settled on. Switches are 0 or 1. Raises OSError where
    ``path`` is a link, or a file of another kind, such as a program. Where a disk is full, or the
    file cannot be opened in a later epoch, autotuning goes on without, which is said.
    """

    def __init__(self, path: str) -> None:
        self._path, self._file = path, None
        later = present() > 1  # in an elastic job: behind what the epochs before have tried
        try:
            if path:
                kinds = (",".join(COLUMNS).encode(), b"hierarchical_allreduce,")  # Horovod's
                refuse_others(path, *kinds)
                self._file = create_text(path, newline="", append=later)
        except OSError as error:
            if not later:
                raise
            self._lose(error)
        self._writer = csv.DictWriter(self._file, COLUMNS) if self._file else None
        if self._file is not None and not os.fstat(self._file.fileno()).st_size:
            self._put(dict(zip(COLUMNS, COLUMNS, strict=True)))

    def write(self, sample: int, setting: dict[str, Any], score: float) -> None:
        """Append a line. ``setting`` has a value for every limit that can be tuned."""
        if self._writer is not None:
            row = {name: int(value) for name, value in setting.items() if name in COLUMNS}
            cycle = f"{setting['cycle_time'] * 1e3:.3f}"
            told = {"sample": sample, "cycle_time_ms": cycle, "score_bytes_per_s": f"{score:.0f}"}
            self._put(row | told)

    def close(self) -> None:
        """Close the file."""
        self._writer = None
        if self._file is not None:
            with suppress(OSError):  # of what could not be written before
                self._file.close()

    def _put(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.writerow(row)
        except OSError as error:
            self._lose(error)
            self.close()

    def _lose(self, error: OSError) -> None:
        why = error.strerror or error
        log.warning("autotuning goes on without its log %s: %s", self._path, why)
