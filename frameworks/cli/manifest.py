"""``ringlet manifest``: what Kubernetes needs to run a job, from the options of ``ringlet run``."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Sequence

from ringlet.cli.kubernetes import ELASTIC, KINDS, WantedJob
from ringlet.cli.yaml_text import yaml_text
from ringlet.ring.command.cli import UsageError, assignment
from ringlet.ring.command.flags import add_tunables
from ringlet.ring.errors import LaunchError
from ringlet.ring.variables import check

DESCRIPTION = """\
Print the YAML of a job for Kubernetes: COMMAND as --slots ranks in each of
--nodes pods. A Job needs no operator: its pods find each other by a Service
and prove by a Secret, made anew each time, that they belong together. TrainJob
and MPIJob are Kubeflow's, JobSet is its own project's, RayJob is KubeRay's,
whose COMMAND is a program that uses ringlet.ray."""
EXAMPLES = """\
ringlet manifest --kind Job --name a --image me/a --nodes 4 python train.py
ringlet manifest --kind TrainJob --name a --image me/a --gpus 8 python train.py"""
EPILOG = "docs/where-to-run.md says more."
_DIGITS = 9  # Kubernetes' numbers have 32 bits
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``ringlet manifest``."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "ringlet manifest --kind KIND --name NAME --image IMAGE [options] COMMAND"
    parser.add_argument("--kind", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--name", metavar="NAME", help="name of the job, up to 40 characters")
    parser.add_argument("--image", metavar="IMAGE", help="image with Ringlet and the program")
    parser.add_argument("--namespace", metavar="NAME", help="namespace of the objects")
    for flag, meaning in (
        ("--nodes", "pods (default: 1)"),
        ("--slots", "ranks in each pod (default: its GPUs, else 1)"),
        ("--gpus", "GPUs of each pod (default: 0)"),
        ("--restarts", "how often the job may begin anew after a failure (default: 0)"),
        ("--min-nodes", f"fewest pods of an elastic job ({', '.join(ELASTIC)})"),
        ("--max-nodes", "most pods of an elastic job"),
    ):
        parser.add_argument(flag, metavar="N", help=meaning)
    parser.add_argument("--cpu", metavar="CORES", help="processor cores of each pod, as 4 or 500m")
    parser.add_argument("--memory", metavar="AMOUNT", help="memory of each pod, such as 16Gi")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:PATH",
        help="let a persistent volume claim appear at PATH; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], metavar="KEY=VALUE", help="set a variable for all"
    )
    parser.add_argument(
        "--network-interface", dest="interfaces", metavar="NAME[,NAME]",
        help="network interface to use; the first of these that a pod has",
    )  # fmt: skip
    parser.add_argument("--start-timeout", metavar="SECONDS", help="how long pods may take to come")
    add_tunables(parser)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program of one rank"
    )


def main(options: argparse.Namespace) -> int:
    """Print the manifest and return the exit code."""
    try:
        wanted = _wanted(options)
    except (UsageError, LaunchError) as error:
        print(f"ringlet manifest: {error}", file=sys.stderr)
        return 2
    print(yaml_text(KINDS[options.kind](wanted)), end="")
    return 0


def _wanted(options: argparse.Namespace) -> WantedJob:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    _refuse_incomplete(options, command)
    number = {
        name: _number(options, name, least)
        for name, least in (
            ("nodes", 1), ("slots", 1), ("gpus", 0), ("restarts", 0), ("min_nodes", 1),
            ("max_nodes", 1),
        )
    }  # fmt: skip
    nodes, gpus = number["nodes"] or 1, number["gpus"] or 0
    fewest, most = number["min_nodes"], number["max_nodes"]
    _check_nodes(options.kind, nodes, fewest, most)
    env = _variables(options)
    _refuse_surrogates([*command, *(word for pair in env.items() for word in pair)])
    resources = {"cpu": options.cpu, "memory": options.memory}
    passed = {"--network-interface": options.interfaces, "--start-timeout": options.start_timeout}
    return WantedJob(
        name=options.name,
        image=options.image,
        command=command,
        nodes=nodes,
        slots=number["slots"] or gpus or 1,
        secret=secrets.token_hex(32),
        gpus=gpus,
        resources={name: value for name, value in resources.items() if value is not None},
        env=env,
        volumes=_volumes(options.volume),
        options=[word for pair in passed.items() if pair[1] is not None for word in pair],
        restarts=number["restarts"] or 0,
        fewest=(fewest or nodes) if fewest or most else None,
        most=most,
        namespace=options.namespace,
    )


def _refuse_incomplete(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Raise UsageError where something is missing, or is of no use to the kind of job."""
    if options.kind not in KINDS:
        given = "is missing" if options.kind is None else f"{options.kind!r} is not known"
        raise UsageError(f"--kind {given}: one of {', '.join(KINDS)}")
    for name in ("name", "image"):
        if not getattr(options, name):
            raise UsageError(f"--{name} is missing")
    if not _NAME.fullmatch(options.name):
        raise UsageError(
            f"--name {options.name!r}: up to 40 lower-case letters, digits and hyphens, a letter"
            " first"
        )
    if not command:
        raise UsageError("a command is missing: ringlet manifest ... python train.py")
    for flag, value in {
        "--slots": options.slots,
        "--network-interface": options.interfaces,
        "--start-timeout": options.start_timeout,
    }.items():
        if options.kind == "RayJob" and value is not None:
            raise UsageError(
                f"{flag} is of no use to a RayJob: its program says so to ringlet.ray, which"
                " starts the ranks"
            )


def _check_nodes(kind: str, nodes: int, fewest: int | None, most: int | None) -> None:
    """Raise UsageError where an elastic job cannot have as many pods."""
    if (fewest or most) and kind not in ELASTIC:
        raise UsageError(
            f"--min-nodes, --max-nodes: the pods of a {kind} do not come and go; those of"
            f" {', '.join(ELASTIC[:-1])} and {ELASTIC[-1]} do"
        )
    if fewest and fewest > nodes:
        raise UsageError(f"--min-nodes {fewest} is more than --nodes {nodes}")
    if most and nodes > most:
        raise UsageError(f"--nodes {nodes} is more than --max-nodes {most}")


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of all ranks. Raises UsageError where it is wrong, or has a secret."""
    env = {**options.tunables, **dict(map(assignment, options.env))}
    try:
        check(env)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if "RINGLET_SECRET" in env:
        raise UsageError(
            "--env RINGLET_SECRET would show it to all who may read the job: leave it out, the"
            " manifest has a Secret with one of its own"
        )
    return env


def _number(options: argparse.Namespace, name: str, least: int) -> int | None:
    text = getattr(options, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS or int(text) < least:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} takes a number of at least {least}, not {text!r}")
    return int(text)


def _refuse_surrogates(words: Sequence[str]) -> None:
    """Raise UsageError where there are bytes that are no text, which YAML cannot hold."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{word!r} is no UTF-8, which a manifest has to be") from None


def _volumes(texts: Sequence[str]) -> list[tuple[str, str]]:
    found = list(map(_volume, texts))
    paths = [path for _, path in found]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UsageError(f"--volume lets two claims appear at {twice[0]}")
    return found


def _volume(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not claim or not colon or not path.startswith("/"):
        raise UsageError(f"--volume takes CLAIM:/PATH, not {text!r}")
    return claim, path
