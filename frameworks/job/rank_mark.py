"""The mark of a rank, by which children that multiprocessing starts from it are known."""

from __future__ import annotations

import multiprocessing
import os

from ringlet.ring.errors import LaunchError
from ringlet.ring.rendezvous.environment import detect

_MARK = "_RANK_OF_RINGLET"  # the process that is a rank, and which; whatever it starts inherits it


def mark_rank() -> None:
    """Note for children that this process is the rank that the environment names."""
    os.environ[_MARK] = f"{os.getpid()} {_named()}"


def unmark_rank() -> None:
    """Note that this process is no rank any more."""
    if os.environ.get(_MARK, "").partition(" ")[0] == str(os.getpid()):
        del os.environ[_MARK]


def refuse_children() -> None:
    """Raise LaunchError in a child that would join as the rank that its parent is already.

    Over gloo such children would meet each other, and wait for ever where they are not as many as
    there are ranks.
    """
    fork_server = getattr(multiprocessing.current_process(), "_inheriting", False)
    if not (multiprocessing.parent_process() or fork_server) or _MARK not in os.environ:
        return
    pid, _, named = os.environ[_MARK].partition(" ")
    if pid != str(os.getpid()) and named == _named():
        raise LaunchError(
            f"multiprocessing has started this process from rank {detect(os.environ).rank}, process"
            f" {pid}, so it cannot be a rank itself. A DataLoader's worker that is not forked runs "
            "the script anew: put what trains under if __name__ == '__main__':, and call init() "
            "there"
        )


def _named() -> str:
    """Return what the environment says of this process's rank and of where ranks meet."""
    return repr((detect(os.environ), *map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT"))))
