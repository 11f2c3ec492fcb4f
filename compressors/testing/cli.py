"""``ringlet check``: the conformance kit on the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from ringlet.compressors.contract import Compressor
from ringlet.compressors.errors import CompressorError
from ringlet.compressors.spec import resolve
from ringlet.compressors.testing.runner import Named, all_checks, failures_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringlet check``."""
    parser.description = "Check whether a compressor is what it claims to be."
    parser.add_argument(
        "compressor",
        help="a spec such as 'int8 | ef', or MODULE:NAME of a compressor class or instance; "
        "modules are looked for here first",
    )


def main(options: argparse.Namespace) -> int:
    """Print a line per check; return 1 if one fails, 2 if there is nothing to check."""
    try:
        compressor = _find(options.compressor)
    except CompressorError as error:
        print(f"ringlet check: {error}", file=sys.stderr)
        return 2
    return report(compressor, all_checks())


def report(plugin: Any, checks: Sequence[Named]) -> int:
    """Print a line per check, then what failed; return 1 if one did."""
    print(f"checking {plugin}")
    failures = failures_of(
        plugin, checks, lambda name, ok: print(f"  {'ok    ' if ok else 'FAILED'}  {name}")
    )
    for failure in failures:
        print(f"\n{failure}")
    print(f"\n{len(checks) - len(failures)} of {len(checks)} checks passed")
    return 1 if failures else 0


def _find(text: str) -> Compressor:
    module_name, colon, name = text.partition(":")
    if not colon or "|" in module_name or "(" in module_name:
        return resolve(text)
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:
        raise CompressorError(
            f"{module_name} does not import: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, type) and issubclass(found, Compressor):
        found = found()
    if not isinstance(found, Compressor):
        raise CompressorError(f"{module_name} has no compressor {name!r} (found: {found!r})")
    return resolve(found)
