"""Timelines of all ranks for Perfetto or chrome://tracing, and merging what a crash left behind."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from ringlet.fusion.observe.merge import merge, rank_files
from ringlet.runtime import current


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write what all ranks do from now on to ``file_path``, on rank 0's machine.

    Any rank may call this, or all with the same path. ``mark_cycles`` marks when the engine asks
    for what was submitted. Raises OSError when the file cannot be written, and ValueError while
    another timeline is.
    """
    current().engine.timelines.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline on all ranks; on return, rank 0 finds it merged. ``shutdown`` does so too.

    Does nothing when none is being written. Raises OSError when it cannot be.
    """
    current().engine.timelines.stop()


def timeline_span(name: str) -> AbstractContextManager[None]:
    """Show a with-block of the program, such as "backward", in the timeline, if one is written."""
    return current().engine.timelines.stretch(name)


# -- the command line: ringlet timeline FILE ----------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``main`` needs to ``parser``."""
    parser.description = "Merge the ranks' parts of a timeline that a crash left behind."
    parser.add_argument("path", type=Path, help="the timeline, as it was to be called: t.json")
    parser.add_argument(
        "parts", nargs="*", type=Path, help="the ranks' parts (default: those beside it)"
    )


def main(options: argparse.Namespace) -> int:
    """Merge; return the exit code."""
    parts = options.parts or rank_files(options.path)
    if not parts:
        sample = options.path.with_name(f"{options.path.stem}.rank0{options.path.suffix}")
        print(f"ringlet timeline: there is no {sample}, nor another rank's part", file=sys.stderr)
        return 2
    try:
        said = merge(options.path, parts)
    except OSError as error:
        print(f"ringlet timeline: {error}", file=sys.stderr)
        return 2
    print(f"{options.path}: {said['events']} events of {said['ranks']} ranks")
    return 0
