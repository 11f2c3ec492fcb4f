"""``ringlet run``: the arguments, what is wrong with them, and the exit code."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from ringlet.ring.command.elastic_flags import (
    add_elastic,
    check_cooldown,
    discovery_of,
    is_elastic,
    rules_of,
    slots_here,
    tell_idle,
)
from ringlet.ring.command.flags import add_tunables
from ringlet.ring.elastic import driver
from ringlet.ring.errors import RingError
from ringlet.ring.hosts.batch_hosts import allocated
from ringlet.ring.hosts.hosts import Host, check_all_slots, chosen_hosts, is_here
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.job import launch
from ringlet.ring.launch.machine import examine
from ringlet.ring.launch.time_limits import time_limit
from ringlet.ring.rendezvous.environment import check_transport
from ringlet.ring.variables import read_time

DESCRIPTION = """\
Start COMMAND once per rank, on this machine or on the hosts given, and connect
the ranks, so that ringlet's init() finds them. Lines that a rank prints appear
with the rank in front. When a rank fails, the others are ended, and its exit
code is returned, unless the job is elastic: then the others go on."""
EXAMPLES = """\
ringlet run -np 4 python train.py --epochs 3
ringlet run -np 2 --transport gloo --env SEED=7 python -m package.train
ringlet run -np 8 -H host1:4,host2:4 python train.py
ringlet run --hostfile hosts --rsh "ssh -p 22" -x WANDB_MODE python train.py"""
EPILOG = """\
Other hosts need the same Python, packages and directory as this one, and a
remote shell that asks nothing. docs/launching.md says more."""


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
    parser.usage = "ringlet run [-np N] [-H HOSTS] [options] [--] COMMAND [ARGUMENT ...]"
    parser.add_argument(
        "-np",
        "--np",
        "--num-proc",
        dest="np",
        metavar="N",
        help="number of ranks (with hosts: all their slots unless given)",
    )
    parser.add_argument(
        "--transport",
        metavar="NAME",
        help="mpi, gloo or nccl (default: RINGLET_TRANSPORT, else mpi if it is there)",
    )
    for name in ("mpi", "gloo"):
        parser.add_argument(
            f"--{name}", dest="transport", action="store_const", const=name, help=argparse.SUPPRESS
        )
    add_environment(parser)
    parser.add_argument(
        "-x",
        dest="forward",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="pass a variable on to ranks on other hosts, besides the usual ones; or set it",
    )
    add_hosts(parser)
    add_elastic(parser)
    add_tunables(parser)
    add_output(parser)
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="say neither what is started nor, in the end, the failed rank's last lines again "
        "(so does --no-prefix)",
    )
    parser.add_argument(
        "-cb", "--check-build", action="store_true", help="say what is installed, and end"
    )
    add_command(parser)


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Define the arguments that say where ranks run and how their hosts are reached."""
    group = parser.add_argument_group("hosts")
    group.add_argument("-H", "--hosts", metavar="HOSTS", help="host1:4,host2:4 (ranks on each)")
    group.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="a host a line, as `host slots=4` or `host:4`",
    )
    group.add_argument(
        "--rsh",
        metavar="COMMAND",
        help="remote shell: called with a host and a command for a shell there (default: ssh)",
    )
    group.add_argument("-p", "--ssh-port", metavar="PORT", help="port of ssh")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key file of ssh")
    add_meeting(group, 120)


def add_meeting(group: argparse._ActionsContainer, timeout: int) -> None:
    """Define how ranks meet: by which network, and for how many seconds they are waited for."""
    group.add_argument(
        "--network-interface",
        "--network-interfaces",
        dest="interfaces",
        default="",
        metavar="NAME[,NAME]",
        help="network interface to use; on each host the first of these that it has",
    )
    group.add_argument(
        "--start-timeout",
        metavar="SECONDS",
        help=f"how long ranks may take to start (default: RINGLET_START_TIMEOUT, else {timeout})",
    )
    group.set_defaults(patience=float(timeout))


def add_environment(parser: argparse.ArgumentParser) -> None:
    """Define the argument that sets variables."""
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a variable for every rank; may be given several times",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Define the arguments that say what becomes of what ranks print."""
    parser.add_argument(
        "--output-filename",
        metavar="DIR",
        help="also write what rank N prints to DIR/rank.N/stdout and stderr",
    )
    parser.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="print lines as they are, without [rank]<stdout>: in front",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is started and how")


def add_command(parser: argparse.ArgumentParser) -> None:
    """Define the last arguments: the command, and its own."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the program of one rank; everything after it is its own",
    )


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command, without the -- that may stand in front."""
    return list(options.command[1:] if options.command[:1] == ["--"] else options.command)


def reach_of(options: argparse.Namespace, forward: Sequence[str] = ()) -> Reach:
    """Return how hosts are reached, from the arguments. Raises UsageError, LaunchError."""
    port: int | None = None
    if options.ssh_port is not None:
        if not options.ssh_port.isdecimal() or not 0 < int(options.ssh_port) < 65536:
            raise UsageError(f"--ssh-port takes a port, not {options.ssh_port!r}")
        port = int(options.ssh_port)
    return Reach(
        rsh=options.rsh,
        ssh_port=port,
        ssh_identity_file=options.ssh_identity_file,
        interfaces=tuple(name for name in options.interfaces.split(",") if name),
        start_timeout=_patience(options),
        forward=tuple(forward),
    )


def _patience(options: argparse.Namespace) -> float:
    """Return how many seconds ranks may take to start."""
    if options.start_timeout is None:
        return time_limit("start_timeout", float(options.patience))
    try:
        return read_time("--start-timeout", options.start_timeout)
    except ValueError:
        raise UsageError(f"--start-timeout takes seconds, not {options.start_timeout!r}") from None


def batch_hosts(options: argparse.Namespace, env: Mapping[str, str]) -> list[Host]:
    """Return the hosts of the batch job that this runs in; ``options`` then say how to reach them.

    None outside of one, and where -np says how many ranks its only host is to have.
    """
    found = allocated(env)
    if found is None:
        return []
    hosts = list(found.hosts)
    if len(hosts) == 1 and options.np is not None and is_here(hosts[0].name):
        return []
    slots = sum(host.slots for host in hosts)
    if options.np is not None and options.np.isdecimal() and int(options.np) > slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            f"-np {options.np} needs {options.np} slots, but this batch job has {slots}: {listed}"
            f" ({found.source}); ask for more, or name hosts and slots by -H"
        )
    if options.rsh is None and options.ssh_port is None and options.ssh_identity_file is None:
        options.rsh = shlex.join(found.shell)
    return hosts


def size_of(options: argparse.Namespace, hosts: Sequence[Host]) -> int:
    """Return the number of ranks, from the arguments. Raises UsageError."""
    if options.np is not None:
        return _ranks(options.np, bool(hosts))
    if not hosts:
        command = command_of(options)
        for flag in ("-np", "--np", "-n", "--num-proc"):
            if flag in command[:-1]:
                place = command.index(flag)
                first = [flag, command[place + 1], *command[:place], *command[place + 2 :]]
                raise UsageError(
                    f"-np is missing: options stand before the command, and what is behind it is "
                    f"its own. Write: ringlet run {shlex.join(first)}"
                )
        raise UsageError("-np is missing: how many ranks? (see ringlet run --help)")
    check_all_slots(hosts, options.hostfile or "--hosts")
    return sum(host.slots for host in hosts)


def main(options: argparse.Namespace) -> int:
    """Run the job that ``options`` describe and return the exit code."""
    if options.check_build:
        for finding in examine(os.environ):
            print(f"{finding.name}: {finding.text}")
        return 0
    try:
        hosts = chosen_hosts(options.hosts, options.hostfile)
        if not hosts and options.discovery is None:
            hosts = batch_hosts(options, os.environ)
        elastic = is_elastic(options)
        np = None if elastic and options.np is None else size_of(options, hosts)
        passed = dict(map(_passed_on, options.forward))
        env = {**options.tunables, **passed, **dict(map(assignment, options.env))}
        reach = reach_of(options, tuple(passed))
        if options.transport is not None:
            check_transport(options.transport, "--transport")
        command = command_of(options)
        check_cooldown(options)
        check_command(command, {**os.environ, **env}.get("PATH"))
        if elastic:
            return _elastic(options, command, np, env, hosts, reach)
        tell_idle(options, "ringlet run")
        assert np is not None
        return launch(
            command,
            np,
            options.transport,
            env,
            hosts=hosts,
            reach=reach,
            output=options.output_filename,
            prefix=options.prefix,
            verbose=options.verbose,
            quiet=options.quiet or not options.prefix,
        )
    except UsageError as error:
        return _complain(str(error), error.code)
    except RingError as error:
        return _complain(str(error), 2)


def _elastic(
    options: argparse.Namespace,
    command: Sequence[str],
    np: int | None,
    env: Mapping[str, str],
    hosts: Sequence[Host],
    reach: Reach,
) -> int:
    if not hosts and options.discovery is None:
        slots = slots_here(options, np)
        hosts = [Host("localhost", _ranks(str(slots), hosts=False))]
    elif options.max_np is None:
        check_all_slots(hosts, options.hostfile or "--hosts")
    return driver.launch(
        command,
        rules_of(options, np, hosts),
        discovery_of(options, hosts),
        options.transport,
        env,
        reach=reach,
        output=options.output_filename,
        prefix=options.prefix,
        verbose=options.verbose or (options.prefix and not options.quiet),
    )


def _complain(message: str, code: int) -> int:
    print(f"ringlet run: {message}", file=sys.stderr)
    return code


def _ranks(text: str, hosts: bool) -> int:
    try:
        np = int(text)
    except ValueError:
        raise UsageError(f"-np takes a number of ranks, not {text!r}") from None
    if np < 1:
        raise UsageError(f"-np {np}: a job needs at least one rank")
    if np > most_ranks() and not hosts:
        raise UsageError(
            f"-np {np}: more than {most_ranks()} ranks on this machine are refused; name hosts, as "
            f"in -H localhost:{np}, if that is meant"
        )
    return np


def assignment(text: str) -> tuple[str, str]:
    """Read ``KEY=VALUE``. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--env takes KEY=VALUE, not {text!r}")
    return key, value


def _passed_on(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key:
        raise UsageError(f"-x takes NAME or NAME=VALUE, not {text!r}")
    if not equals and key not in os.environ:
        raise UsageError(f"-x {key}: there is no such variable here; give -x {key}=VALUE")
    return key, value if equals else os.environ[key]


def check_command(
    command: Sequence[str], path: str | None, example: str = "ringlet run -np 2 python train.py"
) -> None:
    """Raise UsageError unless ``command`` can be started with ``path`` as the search path."""
    if not command:
        raise UsageError(f"a command is missing: {example}")
    name = command[0]
    if not name:
        raise UsageError("the command is an empty string")
    if shutil.which(name, path=path):
        return
    if os.path.isdir(name):
        raise UsageError(f"{name} is a directory, not a command", 126)
    if not os.path.isfile(name):
        first, *more = name.split(maxsplit=1) or [""]
        quoted = bool(more) and shutil.which(first, path=path) is not None
        hint = f"; without the quotes: {name}" if quoted else ""
        raise UsageError(f"command not found: {name}{hint}", 127)
    # A file here: the usual slip is to leave out the interpreter.
    python = f"python {name}" if name.endswith(".py") else None
    direct = None if os.sep in name else f".{os.sep}{name}"
    if os.access(name, os.X_OK):
        ways = " or ".join(way for way in (python, direct) if way)
        raise UsageError(f"{name} is not on PATH; did you mean: {ways}", 127)
    hint = f"; did you mean: {python}" if python else ""
    raise UsageError(f"{name} is not executable{hint}", 126)
