"""``ringlet check``: the conformance kits of compressors and precision policies."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from ringlet.compressors.testing import check_command
from ringlet.precision import Policy, parse_policy


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
    """Print a line per check; return 1 if one fails, 2 if there is nothing to check."""
    if not options.policy:
        return check_command.main(options)
    from ringlet.precision.testing import all_checks

    try:
        policy = _find(options.compressor)
    except ValueError as error:
        print(f"ringlet check: {error}", file=sys.stderr)
        return 2
    return check_command.report(policy, all_checks())


def _find(text: str) -> Policy:
    module_name, colon, name = text.partition(":")
    if not colon or "(" in module_name:
        return parse_policy(text)
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name, None)
        found = found() if callable(found) else found
    except Exception as error:
        raise ValueError(
            f"{module_name} does not import: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Policy):
        raise ValueError(f"{module_name} has no policy {name!r} (found: {found!r})")
    return found
