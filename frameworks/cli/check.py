"""``ringlet check``: the conformance kits of compressors and precision policies."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys

from ringlet.cli.progress import Progress
from ringlet.compressors.testing import check_command
from ringlet.compressors.testing.check_command import Telling
from ringlet.compressors.testing.tools.named_check import exits_raised
from ringlet.precision import Policy, parse_policy

EXAMPLES = """\
ringlet check "int8 | ef"                  # a spec
ringlet check "mine:Sign(scale=2) | ef"    # a class of mine.py, here
ringlet check --policy "fp16(static=128)"  # a precision policy"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringlet check``."""
    check_command.add_arguments(parser)
    parser.description = "Check whether a compressor or a precision policy is what it claims to be."
    parser.add_argument(
        "--policy",
        action="store_true",
        help="check a precision policy instead: a spec such as 'fp16(static=128)', or MODULE:NAME",
    )


def main(options: argparse.Namespace) -> int:
    """Print a line per check; return 1 if one fails, 2 if there is nothing to check.

    On a terminal a bar stands for the checks that pass. Where a plugin crashes this process, the
    lines of Python that it was in are printed.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    if not options.policy:
        return check_command.main(options, _bar())
    from ringlet.precision.testing import all_checks

    try:
        policy = _find(options.compressor)
    except ValueError as error:
        print(f"ringlet check: {error}", file=sys.stderr)
        return 2
    return check_command.report(policy, all_checks(), _bar(), options.json)


def _bar() -> Telling | None:
    """Return what shows checks as a bar, None where the output is no terminal."""
    if not sys.stdout.isatty():
        return None
    progress: Progress | None = None

    def told(name: str, ok: bool | None, total: int) -> None:
        nonlocal progress
        progress = progress or Progress(total)
        progress.end()
        progress.begin(name)
        if ok is False:
            progress.wipe()
            print(f"  FAILED  {name}", flush=True)
        if progress.finished:
            progress.wipe()

    return told


def _find(text: str) -> Policy:
    module_name, colon, name = text.partition(":")
    if not colon or "(" in module_name:
        return parse_policy(text)
    sys.path.insert(0, os.getcwd())
    try:
        with exits_raised():
            found = getattr(importlib.import_module(module_name), name, None)
            found = found() if callable(found) else found
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{module_name} does not import: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Policy):
        raise ValueError(f"{module_name} has no policy {name!r} (found: {found!r})")
    return found
