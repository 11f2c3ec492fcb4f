"""``ringlet node``: one command for every node of a job, which find each other without ssh."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringlet.ring.command.cli import (
    UsageError,
    add_command,
    add_environment,
    add_meeting,
    add_output,
    assignment,
    check_command,
    command_of,
    reach_of,
)
from ringlet.ring.command.elastic_flags import (
    add_elastic,
    check_cooldown,
    is_elastic,
    rules_of,
    tell_idle,
)
from ringlet.ring.command.flags import add_tunables
from ringlet.ring.elastic import driver
from ringlet.ring.elastic.arriving_nodes import ArrivingNodes
from ringlet.ring.errors import LaunchError, RingError
from ringlet.ring.hosts.hosts import bare
from ringlet.ring.hosts.interfaces import find_interface
from ringlet.ring.launch.job import launch
from ringlet.ring.launch.start import asked_transport
from ringlet.ring.placed.node_rendezvous import NodeRendezvous, serve_as_node
from ringlet.ring.placed.whereabouts import PORT, Whereabouts, whereabouts
from ringlet.ring.rendezvous.environment import check_transport
from ringlet.ring.wire.addresses import addresses_of
from ringlet.ring.wire.framing import derive
from ringlet.ring.wire.keys import SECRET, job_key

TITLE = "ringlet node"  # what lines of its own begin with
DESCRIPTION = """\
Start COMMAND as --slots ranks on this node, and connect them with those of the
other nodes, each of which runs this same command. The first node waits for the
others, prints what all ranks print, and decides how the job ends.

Which node this is stands in the environment of a Slurm step, of a pod of an
indexed Job (with the name of its Service), and of a TrainJob. Elsewhere
--nodes, --node and --first say it. All nodes need the same RINGLET_SECRET.

With --min-np training begins when so many ranks are there, and goes on while
they are: other nodes may come later, go, and come again, but the first one."""
EXAMPLES = """\
ringlet node --slots 8 python train.py   # in a pod, or behind Slurm's srun
ringlet node --nodes 2 --node 1 --first host0 --slots 4 python train.py
ringlet node --min-np 8 --slots 8 python train.py   # nodes come and go"""
EPILOG = "docs/where-to-run.md says more."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``ringlet node``."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "ringlet node [--slots N] [options] [--] COMMAND [ARGUMENT ...]"
    for flag, meaning in (
        ("--slots", "ranks on this node (default: 1)"),
        ("--nodes", "how many nodes there are"),
        ("--node", "which of them this is, from 0"),
        ("--port", f"port that the first node listens on (default: {PORT}, or of the batch job)"),
    ):
        parser.add_argument(flag, metavar="N", help=meaning)
    parser.add_argument("--first", metavar="HOST", help="name or address of the first node")
    parser.add_argument(
        "--service", metavar="NAME", help="Service that gives the pods of an indexed Job names"
    )
    parser.add_argument(
        "--transport",
        metavar="NAME",
        help="mpi, gloo or nccl (default: RINGLET_TRANSPORT, else gloo)",
    )
    add_elastic(parser, nodes=True)
    add_environment(parser)
    add_meeting(parser, 300)
    add_tunables(parser)
    add_output(parser)
    add_command(parser)
    parser.set_defaults(rsh=None, ssh_port=None, ssh_identity_file=None)


def main(options: argparse.Namespace) -> int:
    """Run this node's part of the job and return the job's exit code."""
    try:
        return _run(options)
    except (UsageError, RingError) as error:
        print(f"{TITLE}: {error}", file=sys.stderr)
        return error.code if isinstance(error, UsageError) else 2


def _run(options: argparse.Namespace) -> int:
    command = command_of(options)
    env = {**options.tunables, **dict(map(assignment, options.env))}
    example = "ringlet node --slots 2 python train.py"
    check_cooldown(options)
    check_command(command, {**os.environ, **env}.get("PATH"), example)
    transport = asked_transport(options.transport, env) or "gloo"
    check_transport(transport, "--transport")
    reach = reach_of(options)
    here = found(options)
    rules = rules_of(options, None, [], nodes=True) if is_elastic(options) else None
    if rules is None:
        tell_idle(options, TITLE, nodes=True)
    secret = _secret(here)
    assert here.first is not None
    if here.node:
        return serve_as_node(
            here.node, here.first, here.port, secret, here.slots, reach.start_timeout
        )
    printing: dict[str, Any] = {
        "output": options.output_filename,
        "prefix": options.prefix,
        "verbose": options.verbose,
        "title": TITLE,
    }
    if here.nodes == 1 and rules is None:
        return launch(command, here.slots, transport, env, reach=reach, **printing)
    assert here.nodes is not None
    meeting = here.nodes, _own_address(here.first, reach.interfaces), here.port, secret, here.slots
    if rules is not None:
        arriving = ArrivingNodes(*meeting)
        job = command, rules, arriving, transport, env
        return _lead(arriving, lambda: driver.launch(*job, reach=reach, **printing))
    rendezvous = NodeRendezvous(*meeting)

    def gathered() -> int:
        hosts = rendezvous.gather(reach.start_timeout)
        slots = sum(host.slots for host in hosts)
        there = replace(reach, arrived=rendezvous.arrived())
        return launch(command, slots, transport, env, hosts=hosts, reach=there, **printing)

    return _lead(rendezvous, gathered)


def _lead(nodes: NodeRendezvous, run: Callable[[], int]) -> int:
    """``run`` the job and return its exit code, which other ``nodes`` hear; a 2 if it raises."""
    with nodes:
        code = 2
        try:
            code = run()
        finally:
            nodes.dismiss(code)
    return code


def found(options: argparse.Namespace) -> Whereabouts:
    """Return which node this is; options count before the environment. Raises LaunchError."""
    said: dict[str, object] = {}
    for name, least in (("slots", 1), ("nodes", 1), ("node", 0), ("port", 1)):
        text = getattr(options, name)
        if text is None:
            continue
        if not text.isdecimal() or not least <= int(text) < (65536 if name == "port" else 10**9):
            wanted = "from 1 to 65535" if name == "port" else f"of at least {least}"
            raise UsageError(f"--{name} takes a number {wanted}, not {text!r}")
        said[name] = int(text)
    if options.first is not None:
        said["first"] = _host(options.first)
    by_hand = {"nodes", "node", "first"} <= said.keys()
    known = Whereabouts() if by_hand else whereabouts(os.environ, socket.getfqdn(), options.service)
    return replace(known, **said).complete()  # type: ignore[arg-type]


def _host(text: str) -> str:
    """Return the host that ``--first`` names. Raises UsageError where a port is behind it."""
    name, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.endswith("]")):
        raise UsageError(f"--first takes a host without a port: --first {bare(name)} --port {port}")
    return text


def _secret(here: Whereabouts) -> bytes:
    key = job_key(os.environ)
    if key is None and here.nodes != 1:
        raise LaunchError(
            f"{SECRET} is not set: nodes prove by it that they belong together. Give all of them"
            " the same text of at least 16 characters, such as what `openssl rand -hex 32` prints"
        )
    return derive(key or b"", "nodes")


def _own_address(first: str, interfaces: tuple[str, ...]) -> str:
    """Return the address of this node at which the others look for it."""
    if interfaces:
        return find_interface(interfaces)[1]
    addresses = addresses_of(first)
    if not addresses:
        raise LaunchError(f"the name of the first node, {first}, is not known here")
    return addresses[0]
