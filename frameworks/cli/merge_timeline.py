"""``ringlet timeline``: merging the parts of a timeline that a crash left behind."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

from ringlet.fusion.observe.merge import BEGINNINGS, Part, merge, rank_files, read
from ringlet.ring.safe_files import is_planted, open_own, refuse_others

EXAMPLES = "ringlet timeline t.json        # merges t.rank0.json, t.rank1.json and so on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``main`` needs to ``parser``."""
    parser.description = "Merge the ranks' parts of a timeline that a crash left behind."
    parser.add_argument("path", type=Path, help="the timeline, as it was to be called: t.json")
    parser.add_argument(
        "parts",
        nargs="*",
        default=[],  # or argparse counts them among what is missing
        type=Path,
        help="the ranks' parts (default: those beside it)",
    )


def main(options: argparse.Namespace) -> int:
    """Merge; return the exit code."""
    parts = options.parts or rank_files(options.path)
    stem = re.sub(r"\.rank\d+$", "", options.path.stem)
    if options.parts and stem != options.path.stem:  # t.rank*.json: this part would be lost
        whole = options.path.with_name(stem + options.path.suffix)
        print(
            f"ringlet timeline: {options.path} is a rank's part, and would be written over; name "
            f"what is to be written first: ringlet timeline {whole} {options.path} ...",
            file=sys.stderr,
        )
        return 2
    if not parts:
        sample = options.path.with_name(f"{options.path.stem}.rank0{options.path.suffix}")
        print(f"ringlet timeline: there is no {sample}, nor another rank's part", file=sys.stderr)
        return 2
    try:
        refuse_others(options.path, *BEGINNINGS)
        with ExitStack() as opened:
            # What nobody has named may have become a link since it was found.
            files: list[Part] = options.parts or [
                opened.enter_context(os.fdopen(_open_found(part), "rb")) for part in parts
            ]
            if not any(event for file in files for event in read(file)):
                named = " and ".join(map(str, parts))
                print(f"ringlet timeline: no event of a timeline is in {named}", file=sys.stderr)
                return 2
            said = merge(options.path, files)
    except FileExistsError as error:
        print(f"ringlet timeline: {error.filename} {error.strerror}", file=sys.stderr)
        return 2
    except OSError as error:
        # What fills a disk names no file.
        why = error if error.filename else f"{options.path}: {error.strerror}"
        print(f"ringlet timeline: {why}", file=sys.stderr)
        return 2
    print(f"{options.path}: {said['events']} events of {said['ranks']} ranks")
    return 0


def _open_found(part: Path) -> int:
    """Return a descriptor of a part that nobody has named; OSError for a stranger's."""
    descriptor = open_own(part)
    if is_planted(os.fstat(descriptor), os.stat(part.parent)):
        os.close(descriptor)
        text = "belongs to another user, and is not read; name the parts that are to be merged"
        raise OSError(errno.EACCES, text, str(part))
    return descriptor
