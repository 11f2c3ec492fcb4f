"""``ringlet report run.jsonl``: one HTML file that says what compression saved or cost."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from ringlet.report import comparison, single_run
from ringlet.report.page_frame import BEGINNING
from ringlet.report.summary import NotARun, read, verdict
from ringlet.ring.safe_files import create_text, refuse_others

EXAMPLES = """\
ringlet report run.jsonl                  # writes run.html
ringlet report none.jsonl int8.jsonl      # compares two runs"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``main`` needs to ``parser``."""
    parser.description = (
        "Draw what compression saved or cost in a run, as one HTML file; or how runs compare."
    )
    parser.add_argument(
        "metrics",
        type=Path,
        nargs="+",
        metavar="run.jsonl",
        help="what RINGLET_METRICS=run.jsonl wrote; others are compared with the first",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="where to write (default: beside it, as .html)"
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")


def main(options: argparse.Namespace) -> int:
    """Write the report; return the exit code."""
    paths: list[Path] = options.metrics
    stem = "-".join(path.stem for path in paths)
    try:
        runs = [read(path) for path in paths]
        output = options.output or paths[-1].with_name(f"{stem}.html")
        if len(runs) == 1:
            kind, sentence = verdict(runs[0])
            text = single_run.render(runs[0], _shown(paths[0]))
        else:
            named = list(zip(map(_shown, paths), runs, strict=True))
            kind, sentence = comparison.verdict(named), " ".join(comparison.sentences(named))
            text = comparison.render(named)
    except FileNotFoundError as error:
        remedy = "RINGLET_METRICS=run.jsonl makes a run write one"
        print(f"ringlet report: there is no file {error.filename}; {remedy}", file=sys.stderr)
        return 2
    except IsADirectoryError as error:
        print(f"ringlet report: {error.filename} is a folder, not a file", file=sys.stderr)
        return 2
    except (OSError, NotARun) as error:
        print(f"ringlet report: {error}", file=sys.stderr)
        return 2
    if why := _unwritten(output, text):
        print(f"ringlet report: {why}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"verdict": kind, "sentence": sentence, "page": str(output)}))
        return 0
    print(sentence)
    print(output)
    return 0


def _shown(path: Path) -> str:
    """Return a file's name as text, which it need not be."""
    return os.fsencode(path.name).decode(errors="replace")


def _unwritten(output: Path, text: str) -> str | None:
    """Write ``text`` to the file ``output``; return why that cannot be, None if it is done."""
    if not output.parent.is_dir():
        return f"there is no folder {output.parent} to write the report to"
    if output.is_file():  # no pipe, which would be waited for
        with contextlib.suppress(OSError, NotARun):
            read(output)
            return f"{output} is a run's record, and would be lost; name another file with -o"
    try:
        refuse_others(output, BEGINNING.encode())
        with create_text(output) as file:
            file.write(text)
    except IsADirectoryError:
        return f"{output} is a folder, not a file"
    except OSError as error:
        # Where we refuse it, the text says why as a sentence about the file.
        usual = error.strerror == os.strerror(error.errno or 0)
        return f"{error.filename or output} {'cannot be written: ' * usual}{error.strerror}"
    return None
