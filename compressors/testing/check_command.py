"""What ``ringlet check`` does for a compressor: the conformance kit on the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Compressor, storage
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.specs.parser import resolve
from ringlet.compressors.testing.catalogue import all_checks
from ringlet.compressors.testing.runner import failures_of
from ringlet.compressors.testing.tools.inputs import gaussian
from ringlet.compressors.testing.tools.named_check import Named, exits_raised
from ringlet.compressors.testing.tools.simulate import by_payload, context, encode, simulate

_SIDE = 256  # of a matrix
_SLOW = 30.0  # seconds of one check, which take a few at most

Telling = Callable[[str, bool | None, int], None]  # a check's name, whether it passed, how many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ringlet check``."""
    parser.description = "Check whether a compressor is what it claims to be."
    parser.add_argument(
        "compressor",
        help="a spec such as 'int8 | ef' or 'MODULE:NAME(option=1) | ef' with the class of a "
        "compressor; modules are looked for here first",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def main(options: argparse.Namespace, telling: Telling | None = None) -> int:
    """Print a line per check that was run; return 1 if one fails, 2 if there is nothing to check.

    ``telling`` shows checks in place of these lines.
    """
    sys.path.insert(0, os.getcwd())
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # the other process that takes part would be a compressor's failure
        print(
            "ringlet check: no folder for temporary files can be written to (is the disk full?); "
            "name one in TMPDIR",
            file=sys.stderr,
        )
        return 2
    try:
        with exits_raised():
            compressor = resolve(options.compressor)
    except CompressorError as error:
        print(f"ringlet check: {error}", file=sys.stderr)
        return 2
    code = report(compressor, all_checks(), telling, options.json)
    if code == 0 and not options.json:
        bits, lost = cost_of(compressor)
        print(f"a Gaussian matrix: {bits:.3g} bits a value, and {lost:.2%} of its norm is lost")
    return code


def cost_of(compressor: Compressor) -> tuple[float, float]:
    """Return how many bits a rank sends for each value, and the relative error of what arrives.

    Of a square matrix of Gaussian values, at the first step, alone.
    """
    x, shape, rounds = gaussian(_SIDE**2, 1), (_SIDE, _SIDE), list[tuple[str, str, int]]()
    (out,) = simulate(compressor, [x], shape=shape, rounds=rounds)
    sent = sum(storage(dtype).itemsize * length for _, dtype, length in rounds)
    if by_payload(compressor):
        payload = encode(compressor.at(0), x, context(x, shape=shape))
        sent = sum(array.nbytes for array in payload.values())
    return 8 * sent / x.size, float(np.linalg.norm(out - x) / np.linalg.norm(x))


def report(
    plugin: Any, checks: Sequence[Named], telling: Telling | None = None, as_json: bool = False
) -> int:
    """Print a line per check that was run, then what failed; return 1 if one did.

    The last line names the checks that took long, as they do where time goes by the square of a
    tensor's length. ``telling(name, ok, total)`` shows a check instead. With ``as_json`` all that
    is printed is an object with "plugin", "checks" by name ("ok", "failed" or "waiting") and
    "failures".
    """
    start, passed, found = time.perf_counter(), {True: 0, False: 0, None: 0}, dict[str, str]()
    before, slow = start, list[str]()

    def told(name: str, ok: bool | None) -> None:
        nonlocal before
        took, before = time.perf_counter() - before, time.perf_counter()
        if took > _SLOW:
            slow.append(f"{name} {took:.0f} s")
        passed[ok] += 1
        found[name] = {True: "ok", False: "failed", None: "waiting"}[ok]
        if telling is not None and not as_json:
            telling(name, ok, len(checks))
        elif not as_json and ok is not None:  # what waits would bury what failed
            print(f"  {'ok' if ok else 'FAILED':6}  {name}")

    if as_json:
        with contextlib.redirect_stdout(sys.stderr):  # where plugins' own words do not spoil it
            failures = failures_of(plugin, checks, told)
        print(json.dumps({"plugin": str(plugin), "checks": found, "failures": failures}, indent=1))
        return 1 if failures else 0
    print(f"checking {plugin}")
    for failure in failures_of(plugin, checks, told):
        print(f"\n{failure}")
    waiting = f", {passed[None]} wait for the ones that failed" if passed[None] else ""
    most = f" ({', '.join(slow)})" if slow else ""
    print(
        f"\n{time.perf_counter() - start:.1f} s{most}: {passed[True]} of {len(checks)} checks "
        f"passed{waiting}"
    )
    return 1 if passed[False] else 0
