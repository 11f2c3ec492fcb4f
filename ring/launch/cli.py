"""``ringlet run``: the arguments, what is wrong with them, and the exit code."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from ringlet.ring.environment import check_transport
from ringlet.ring.errors import RingError
from ringlet.ring.launch.job import launch

SUMMARY = "start a program on several ranks of this machine"
DESCRIPTION = """\
Start COMMAND once per rank on this machine and connect the ranks, so that
ringlet's init() finds them. Lines that a rank prints appear with the rank in
front. When a rank fails, the others are ended, and its exit code is returned."""
EPILOG = """\
examples:
  ringlet run -np 4 python train.py --epochs 3
  ringlet run -np 2 --transport gloo --env SEED=7 python -m package.train"""


class UsageError(Exception):
    """The command line asks for something that cannot be; ``code`` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def most_ranks() -> int:
    """Return how many ranks are still a plausible wish on this machine."""
    return max(128, 4 * (os.cpu_count() or 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``ringlet run``."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "ringlet run -np N [options] [--] COMMAND [ARGUMENT ...]"
    parser.add_argument(
        "-np", "--np", "--num-proc", dest="np", metavar="N", required=True, help="number of ranks"
    )
    parser.add_argument(
        "--transport", metavar="NAME", help="mpi or gloo (default: mpi if it is installed)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a variable for every rank; may be given several times",
    )
    parser.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="print lines as they are, without [rank]<stdout>: in front",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is started and how")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the program of one rank; everything after it is its own",
    )


def main(options: argparse.Namespace) -> int:
    """Run the job that ``options`` describe and return the exit code."""
    try:
        np = _ranks(options.np)
        env = dict(map(_assignment, options.env))
        if options.transport is not None:
            check_transport(options.transport, "--transport")
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        check_command(command, {**os.environ, **env}.get("PATH"))
        return launch(
            command, np, options.transport, env, prefix=options.prefix, verbose=options.verbose
        )
    except UsageError as error:
        return _complain(str(error), error.code)
    except RingError as error:
        return _complain(str(error), 2)


def _complain(message: str, code: int) -> int:
    print(f"ringlet run: {message}", file=sys.stderr)
    return code


def _ranks(text: str) -> int:
    try:
        np = int(text)
    except ValueError:
        raise UsageError(f"-np takes a number of ranks, not {text!r}") from None
    if np < 1:
        raise UsageError(f"-np {np}: a job needs at least one rank")
    if np > most_ranks():
        raise UsageError(f"-np {np}: more than {most_ranks()} ranks on this machine are refused")
    return np


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--env takes KEY=VALUE, not {text!r}")
    return key, value


def check_command(command: Sequence[str], path: str | None) -> None:
    """Raise UsageError unless ``command`` can be started with ``path`` as the search path."""
    if not command:
        raise UsageError("a command is missing: ringlet run -np 2 python train.py")
    name = command[0]
    if not name:
        raise UsageError("the command is an empty string")
    if shutil.which(name, path=path):
        return
    if os.path.isdir(name):
        raise UsageError(f"{name} is a directory, not a command", 126)
    if not os.path.isfile(name):
        raise UsageError(f"command not found: {name}", 127)
    # A file here: the usual slip is to leave out the interpreter.
    python = f"python {name}" if name.endswith(".py") else None
    direct = None if os.sep in name else f".{os.sep}{name}"
    if os.access(name, os.X_OK):
        ways = " or ".join(way for way in (python, direct) if way)
        raise UsageError(f"{name} is not on PATH; did you mean: {ways}", 127)
    hint = f"; did you mean: {python}" if python else ""
    raise UsageError(f"{name} is not executable{hint}", 126)
