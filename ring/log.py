"""What logger "ringlet" says, and how: levels by Horovod's names, the rank before each line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TextIO

LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_VARIABLES = ("RINGLET_LOG_LEVEL", "HOROVOD_LOG_LEVEL")


class RankHandler(logging.StreamHandler[TextIO]):
    """Writes to the standard error, as long as the application has no handlers of its own."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        who = "ringlet" if rank is None else f"ringlet, rank {rank}"
        self.setFormatter(logging.Formatter(f"[{who}] %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``, unless somebody has configured logging since, who shows it as well."""
        if not logging.getLogger().handlers:
            super().emit(record)


def check_level(name: str, source: str) -> int:
    """Return the level called ``name``, in any case. Raises ValueError naming all of them."""
    level = LEVELS.get(name.strip().lower())
    if level is None:
        raise ValueError(f"{source}={name!r} is not a log level: {', '.join(LEVELS)}")
    return level


def level_from(env: Mapping[str, str]) -> int | None:
    """Return the level that RINGLET_LOG_LEVEL, or Horovod's name for it, sets; None if neither."""
    for variable in _VARIABLES:
        if env.get(variable):
            return check_level(env[variable], variable)
    return None


def show(level: int | None, rank: int | None) -> None:
    """Let logger "ringlet" say what is of ``level`` or above; None leaves all as it is.

    If the application has not configured logging, lines appear on the standard error with ``rank``
    in front (None: there are several in this process).
    """
    if level is None:
        return
    logging.addLevelName(LEVELS["trace"], "TRACE")
    log = logging.getLogger("ringlet")
    log.setLevel(level)
    for handler in [handler for handler in log.handlers if isinstance(handler, RankHandler)]:
        log.removeHandler(handler)
    if not log.hasHandlers():
        log.addHandler(RankHandler(rank))
