"""The command line: ``ringlet run`` and whatever joins it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from ringlet import __version__
from ringlet.ring.errors import RingError

# A sub-command is a line: its name, the module with `add_arguments(parser)` and
# `main(options) -> int`, and what it does. Only the module that is needed is imported.
COMMANDS = {
    "run": ("ringlet.ring.command.cli", "start a program on several ranks, on one or more hosts"),
    "node": ("ringlet.ring.command.node", "start ranks on nodes that run one command, without ssh"),
    "doctor": ("ringlet.cli.doctor", "say what is installed, and what the network can do"),
    "manifest": ("ringlet.cli.manifest", "print the YAML of a job for Kubernetes"),
    "report": ("ringlet.cli.draw_report", "draw what compression saved or cost in a run"),
    "timeline": (
        "ringlet.cli.merge_timeline",
        "merge the parts of a timeline that a crash left behind",
    ),
    "check": ("ringlet.cli.check", "check whether a compressor or policy is what it claims"),
    "new": ("ringlet.compressors.testing.scaffold", "make a package for a compressor of your own"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` on the standard error and exit with code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        options = [word for action in self._actions for word in action.option_strings]
        if unknown and (near := difflib.get_close_matches(unknown, options, 1)):
            message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: this process's) and return the exit code."""
    width = max(map(len, COMMANDS)) + 2
    listing = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    parser = Parser(
        prog="ringlet",
        usage="ringlet [--version] [--help] COMMAND ...",
        description="Data-parallel training that is cheap to communicate.",
        epilog=f"commands:\n{listing}\n\n`ringlet COMMAND --help` says more about each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ringlet {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The first word decides; options behind it belong to the sub-command.
    name = parser.parse_args(given[:1]).command
    if name is None:
        parser.error(f"a command is missing; commands: {', '.join(COMMANDS)}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(COMMANDS)}"
        parser.error(f"unknown command {name!r}.{hint}")
    module = import_module(COMMANDS[name][0])
    command = Parser(prog=f"ringlet {name}", allow_abbrev=False)
    module.add_arguments(command)
    try:
        options = command.parse_args(given[1:])
    except RingError as error:
        command.error(str(error))
    code: int = module.main(options)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
