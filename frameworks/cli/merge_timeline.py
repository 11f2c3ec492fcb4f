"""``ringlet timeline``: merging the parts of a timeline that a crash left behind."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ringlet.fusion.observe.merge import merge, rank_files

EXAMPLES = "ringlet timeline t.json        # merges t.rank0.json, t.rank1.json and so on"


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
