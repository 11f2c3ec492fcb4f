"""Starting the ranks of a job on this machine: ``ringlet run`` and ``ringlet.run``."""

from ringlet.ring.launch.api import WorkerFailed, run
from ringlet.ring.launch.job import launch

__all__ = ["WorkerFailed", "launch", "run"]
