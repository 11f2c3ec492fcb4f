"""Starting the ranks of a job on this machine and others, and ending them: ``ringlet run``."""

from ringlet.ring.launch.job import launch

__all__ = ["launch"]
