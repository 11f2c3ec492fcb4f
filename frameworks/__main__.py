"""The command line: ``ringlet run`` and whatever joins it."""

from __future__ import annotations

import argparse
import codecs
import difflib
import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ringlet import __version__
from ringlet.cli.commands import ALSO_CALLED, COMMANDS, grouped
from ringlet.ring.descriptors import hold_standard_descriptors
from ringlet.ring.errors import RingError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """An argument parser whose help begins with examples, and whose errors are one line.

    An error says what was probably meant.
    """

    examples = ""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` on the standard error and exit with code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        options = [word for action in self._actions for word in action.option_strings]
        if unknown and (meant := _meant_by(unknown, options)):
            message += f"; did you mean {meant}?"
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            words = re.findall(r"[\w-]+", choice[2])
            if near := difflib.get_close_matches(choice[1], words, 1):
                message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def format_help(self) -> str:
        """Return the help text, examples first."""
        rest = super().format_help()
        return f"{self.examples.strip()}\n\n{rest}" if self.examples else rest

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse passes over what cannot be written; help that nobody can read is a failure.
        if message and file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def _meant_by(unknown: str, options: Sequence[str]) -> str | None:
    """Return which of ``options`` somebody may have meant who wrote ``unknown``."""
    if "-np" in options:
        if number := re.fullmatch(r"-np(\d+)", unknown):
            return f"-np {number[1]}"
        if unknown.replace("_", "-") in ("--nproc-per-node", "--nproc"):  # torchrun's
            return "-np"
        if unknown == "-m":  # torchrun's, too
            return "python -m"
        if unknown in ("--compression", "--compressor"):
            return "compression=... of DistributedOptimizer, in the program"
    elif unknown == "-np" and "--slots" in options:
        return "--slots"
    near = difflib.get_close_matches(unknown, options, 1)
    return near[0] if near else None


def command_parser(name: str) -> Parser:
    """Return the parser of the command ``name``."""
    module = import_module(COMMANDS[name][0])
    parser = Parser(prog=f"ringlet {name}", allow_abbrev=False)
    module.add_arguments(parser)
    version = f"ringlet {__version__}"  # as for horovodrun
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    parser.examples = getattr(module, "EXAMPLES", "")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (None: this process's) and return the exit code."""
    hold_standard_descriptors()
    _show_what_can_be()
    parser = _whole()
    given = list(sys.argv[1:] if arguments is None else arguments)
    _refuse_programs(given, parser)
    command = "ringlet"
    try:
        try:
            # The first word decides; options behind it belong to the sub-command.
            name = parser.parse_args(given[:1]).command
            if name is None:
                parser.print_help()
                code = 0
            else:
                _refuse_unknown(name, parser)
                command = f"ringlet {name}"
                code = _run(name, given[1:])
        finally:  # also after --help, which exits
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read the output, such as head, has enough of it
        _write_no_more()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno == errno.ENOENT and _is_nowhere():
            print(
                f"{command}: the working directory is gone; cd to one that is there",
                file=sys.stderr,
            )
            return 2
        if error.errno not in FULL or error.filename is not None:
            raise
        _write_no_more()
        print(f"{command}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _show_what_can_be() -> None:
    """Let the standard output escape what its encoding lacks: with LC_ALL=C that may be ASCII."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # which a stand-in for it lacks
    if reconfigure is not None:
        codecs.register_error("ringlet", _escaped)
        reconfigure(errors="ringlet")


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1  # one by one, for what comes next may be of the other kind
    try:  # bytes of a file's name stay what they are
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


def _refuse_programs(given: Sequence[str], parser: Parser) -> None:
    """Exit where the sub-command is left out, and say what to write."""
    first = given[0] if given else ""
    python, rest = ["python"] if first.endswith(".py") else [], ["-np", "2"]
    if first in ("-np", "-H", "--hosts", "--hostfile", "-hostfile", "--num-proc"):
        rest = []  # as for horovodrun
    elif not python and not re.fullmatch(r"(.*/)?python[\d.]*", first):
        return
    whole = shlex.join(["ringlet", "run", *rest, *python, *given])
    parser.error(f"{first!r} is no command of ringlet; to start a program: {whole}")


def _refuse_unknown(name: str, parser: Parser) -> None:
    """Exit unless ``name`` is a command, and say what was probably meant."""
    if name in COMMANDS:
        return
    meant = ALSO_CALLED.get(name)
    near = [meant] if meant else difflib.get_close_matches(name, COMMANDS, 1)
    hint = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(COMMANDS)}"
    parser.error(f"unknown command {name!r}.{hint}")


def _run(name: str, arguments: list[str]) -> int:
    command = command_parser(name)
    try:
        options = command.parse_args(arguments)
    except RingError as error:
        command.error(str(error))
    code: int = import_module(COMMANDS[name][0]).main(options)
    return code


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _write_no_more() -> None:
    """Let what is still in the standard output's buffer go nowhere, or Python complains of it."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _whole() -> Parser:
    width = max(map(len, COMMANDS)) + 2
    listing = ""
    for title, names in grouped().items():
        listing += f"\n{title}:\n"
        listing += "".join(f"  {name:<{width}}{COMMANDS[name][1]}\n" for name in names)
    parser = Parser(
        prog="ringlet",
        usage="ringlet [--version] [--help] COMMAND ...",
        description="Data-parallel training that is cheap to communicate.",
        epilog=f"{listing[1:]}\n`ringlet COMMAND --help` begins with an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.examples = "ringlet run -np 4 python train.py"
    parser.add_argument("--version", action="version", version=f"ringlet {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
