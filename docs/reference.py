"""The reference pages, made from what the code says of itself: none of them is written by hand.

    python docs/reference.py [--check]

Writes the tables of ``docs/configuration.md`` from the registry of environment variables;
``--check`` fails instead where those are not what would be written. The other pages (the command
line from its parsers, compressors from their registry, modules from their docstrings) exist in the
built site only: ``docs/hooks.py`` adds them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import ringlet.compressors as compressors_package
from ringlet.__main__ import command_parser
from ringlet.cli.commands import COMMANDS, grouped
from ringlet.compressors import Compressor, Modifier, Traits, built_in
from ringlet.compressors.core.options import options_of
from ringlet.ring.variables import ENGINE, OBSERVE, PROCESS, RANK, UNDERSTOOD, VARIABLES

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = ROOT / "docs" / "configuration.md"
TABLES = {ENGINE: "engine", OBSERVE: "observability", PROCESS: "process", RANK: "launchers"}
# The modules that users import; a page each.
MODULES = {
    "ringlet": "The launcher from Python",
    "ringlet.torch": "PyTorch",
    "ringlet.tensorflow": "TensorFlow",
    "ringlet.keras": "Keras",
    "ringlet.jax": "JAX",
    "ringlet.mxnet": "MXNet",
    "ringlet.ray": "Ray",
    "ringlet.spark": "Spark",
    "ringlet.dask": "Dask",
    "ringlet.data_loaders": "Loading data ahead",
    "ringlet.compressors": "Compressors",
    "ringlet.compressors.testing": "The conformance kit",
    "ringlet.compressors.adaptive": "Choosing compressors during training",
    "ringlet.precision": "Precision policies",
    "ringlet.observe": "Metrics",
    "ringlet.fusion": "The engine, and its errors",
    "ringlet.ring": "Communicators, and their errors",
}
ROOMS = {
    "dense": "Every value, as it is or cast",
    "quantizers": "Every value in few bits",
    "sparsifiers": "Some of the values",
    "lowrank": "Factors of low rank",
    "modifiers": "Modifiers: what stands behind a `|`",
}

_CODE = re.compile(r"(```.*?```|``[^`]*``|`[^`]*`)", re.DOTALL)


def plain(docstring: str) -> str:
    """Return a docstring as Markdown whose stars, outside code, are stars, as in 2**-8."""
    parts = _CODE.split(docstring)
    return "".join(p if i % 2 else p.replace("*", "\\*") for i, p in enumerate(parts))


def environment(group: str) -> str:
    """Return the table of the environment variables of ``group`` in Markdown."""
    rows = ["| Variable | Default | Meaning |", "|---|---|---|"]
    for name, variable in VARIABLES.items():
        if variable.group != group or not variable.meaning:
            continue
        mark = " (H)" if name.replace("RINGLET_", "HOROVOD_") in UNDERSTOOD else ""
        rows.append(f"| `{name}`{mark} | {variable.default or '-'} | {_cell(variable.meaning)} |")
    return "\n".join(rows)


def configuration() -> str:
    """Return ``docs/configuration.md`` with its tables as the registry has them."""
    text = CONFIGURATION.read_text()
    for group, name in TABLES.items():
        begin, end = f"<!-- {name}: written by docs/reference.py -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{CONFIGURATION.name} lacks the marks of {name}")
        text = before + begin + environment(group) + end + after
    return text


def command_line() -> str:
    """Return the page of the command line: every command's usage, options and examples."""
    parts = ["# Command line\n\nMade from the parsers themselves: `ringlet COMMAND --help`.\n"]
    for group, names in grouped().items():
        parts.append(f"\n| {group} | |\n|---|---|\n")
        parts += [
            f"| [`ringlet {name}`](#ringlet-{name}) | {COMMANDS[name][1]} |\n" for name in names
        ]
    for names in grouped().values():
        for name in names:
            parts.append(_command(name))
    return "".join(parts)


def _command(name: str) -> str:
    parser = command_parser(name)
    text = f"\n## ringlet {name}\n\n```text\n{parser.examples.strip()}\n```\n"
    text += f"\n{_prose(parser.description or '')}\n"
    text += f"\n```text\n{parser.format_usage().strip()}\n```\n"
    rows = [
        f"| `{', '.join(_names(a))}`{_takes(a)} | {_cell(a.help or '')} |" for a in shown(parser)
    ]
    if rows:
        text += "\n| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    if parser.epilog:
        text += f"\n{_prose(parser.epilog)}\n"
    return text


def _prose(text: str) -> str:
    """Return what a command says of itself as one paragraph, with links to the pages it names."""
    return re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](../\1.md)", " ".join(text.split()))


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments that a parser's help tells of."""
    return [a for a in parser._actions if a.help != argparse.SUPPRESS and a.dest != "help"]


def _names(action: argparse.Action) -> list[str]:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return list(action.option_strings) or [metavar]


def _takes(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    metavar = action.metavar or action.dest.upper()
    words = [metavar] if isinstance(metavar, str) else list(metavar)
    return f" `{' '.join(words)}`"


def compressors() -> str:
    """Return the page of all compressors: what each does, its options, its promises, its paper."""
    text = (
        "# Compressors, one by one\n\nMade from the registry: "
        f"{sum(1 for _ in every(Compressor))} compressors and {sum(1 for _ in every(Modifier))} "
        "modifiers. [How specs are written and what each costs](../compressors.md) is a page of "
        "its own, and so is [what they do to training](../convergence.md).\n"
    )
    for room, title in ROOMS.items():
        found = {n: c for n, c in built_in().items() if c.__module__.split(".")[2] == room}
        text += f"\n## {title}\n"
        for name, cls in found.items():
            text += _compressor(name, cls)
    return text


def every(kind: type[Compressor]) -> Iterator[str]:
    """Return the names of all modifiers, or of all compressors that are none."""
    for name, cls in built_in().items():
        if issubclass(cls, Modifier) == (kind is Modifier):
            yield name


def _compressor(name: str, cls: type[Compressor]) -> str:
    doc = plain(inspect.getdoc(cls) or "")
    text = f"\n### `{name}` {{ #{name} }}\n\n{doc}\n"
    if options := options_of(cls):
        text += "\n| option | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
        for option in options.values():
            kind = option.type if isinstance(option.type, str) else option.type.__name__
            row = [f"`{option.name}`", kind, f"`{option.default!r}`", _allowed(option.metadata)]
            text += f"| {' | '.join(map(_cell, [*row, option.metadata.get('doc', '')]))} |\n"
    if not issubclass(cls, Modifier):
        text += f"\n{_promises(cls().traits())}\n"
    if paper := getattr(cls, "paper", ""):
        text += f"\nPaper: {paper}.\n"
    return text


def _allowed(limits: object) -> str:
    assert hasattr(limits, "get")
    if choices := limits.get("choices"):
        return ", ".join(f"`{choice!r}`" for choice in choices)
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ", ".join(
        f"{s} {limits.get(n):g}" for n, s in signs.items() if limits.get(n) is not None
    )


def _promises(traits: Traits) -> str:
    default = Traits()
    told = []
    for field in dataclasses.fields(Traits):
        value = getattr(traits, field.name)
        if value != getattr(default, field.name):
            told.append(f"`{field.name}={value!r}`")
    return f"Traits: {', '.join(told) or 'the defaults'}."


def module(name: str) -> str:
    """Return the page of the module ``name``, which mkdocstrings fills from docstrings."""
    text = f"# {MODULES[name]}: `{name}`\n\n::: {name}\n"
    if name == "ringlet.compressors":  # each compressor has its place on a page of its own
        own = {cls.__name__ for cls in built_in().values()}
        shown = sorted(set(compressors_package.__all__) - own)
        text += "    options:\n      members:\n" + "".join(f"        - {each}\n" for each in shown)
        text += "\n[Compressors, one by one](compressors.md) has the built-in ones.\n"
    return text


def _cell(text: str) -> str:
    """Return ``text`` as a cell of a Markdown table: pipes escaped, percent signs as argparse's."""
    return text.replace("%%", "%").replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Write the tables, or check that they are what would be written."""
    text = configuration()
    if "--check" in sys.argv:
        if text != CONFIGURATION.read_text():
            raise SystemExit("docs/configuration.md is old: run python docs/reference.py")
        return
    CONFIGURATION.write_text(text)


if __name__ == "__main__":
    main()
