"""Starting the ranks of a job on this machine and others, and ending them: ``ringlet run``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringlet.ring.launch.job import launch

__all__ = ["launch"]


def __getattr__(name: str) -> Any:
    # Late: what starts wrappers on another host, which new ranks wait for, needs no launcher.
    if name == "launch":
        from importlib import import_module

        return import_module("ringlet.ring.launch.job").launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
