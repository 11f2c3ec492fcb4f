"""``ringlet completion``: scripts with which a shell completes commands and options."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from ringlet.cli.commands import COMMANDS

SHELLS = ("bash", "zsh", "tcsh")
EXAMPLES = """\
eval "$(ringlet completion bash)"                      # in ~/.bashrc
ringlet completion zsh > ~/.zsh/completions/_ringlet   # in a folder of $fpath"""
DESCRIPTION = """\
Print a script that completes Ringlet's commands and options in a shell. It is
made by shtab: pip install 'ringlet[completion]'."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``ringlet completion``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to complete")


def main(options: argparse.Namespace) -> int:
    """Print the script; return 2 where shtab is missing."""
    try:
        shtab = import_module("shtab")
    except ModuleNotFoundError:
        remedy = "pip install 'ringlet[completion]'"
        print(f"ringlet completion: shtab is not installed; {remedy}", file=sys.stderr)
        return 2
    print(shtab.complete(whole(), shell=options.shell))
    return 0


def whole() -> argparse.ArgumentParser:
    """Return one parser of all commands, such as shtab reads."""
    parser = argparse.ArgumentParser(prog="ringlet", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    rooms = parser.add_subparsers(dest="command")
    for name, (module, text) in COMMANDS.items():
        import_module(module).add_arguments(rooms.add_parser(name, help=text))
    return parser
