"""``ringlet check``: the conformance kit on the command line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.specs.parser import resolve
from ringlet.compressors.testing.catalogue import all_checks
from ringlet.compressors.testing.runner import failures_of
from ringlet.compressors.testing.tools.named_check import Named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringlet check``."""
    parser.description = "Check whether a compressor is what it claims to be."
    parser.add_argument(
        "compressor",
        help="a spec such as 'int8 | ef' or 'MODULE:NAME(option=1) | ef' with the class of a "
        "compressor; modules are looked for here first",
    )


def main(options: argparse.Namespace) -> int:
    """Print a line per check; return 1 if one fails, 2 if there is nothing to check."""
    sys.path.insert(0, os.getcwd())
    try:
        compressor = resolve(options.compressor)
    except CompressorError as error:
        print(f"ringlet check: {error}", file=sys.stderr)
        return 2
    return report(compressor, all_checks())


def report(plugin: Any, checks: Sequence[Named]) -> int:
    """Print a line per check, then what failed; return 1 if one did."""
    print(f"checking {plugin}")
    start, marks = time.perf_counter(), {True: "ok", False: "FAILED", None: "-"}
    passed = dict.fromkeys(marks, 0)

    def told(name: str, ok: bool | None) -> None:
        passed[ok] += 1
        print(f"  {marks[ok]:6}  {name}")

    for failure in failures_of(plugin, checks, told):
        print(f"\n{failure}")
    waiting = f", {passed[None]} wait for the ones that failed" if passed[None] else ""
    print(
        f"\n{time.perf_counter() - start:.1f} s: {passed[True]} of {len(checks)} checks passed"
        f"{waiting}"
    )
    return 1 if passed[False] else 0
