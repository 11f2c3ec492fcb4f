"""The flags of an elastic job, which are horovodrun's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.rules import Rules, checked_rules, flag
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.launch.time_limits import time_limit

_FLAGS = {"min_np": "--min-np", "max_np": "--max-np"}
_RULES = {
    "reset_limit": "--reset-limit",
    "elastic_timeout": "--elastic-timeout",
    "cooldown": "--blacklist-cooldown-range",
}


def add_elastic(parser: argparse.ArgumentParser, nodes: bool = False) -> None:
    """Define the flags; with ``nodes`` for hosts that come by themselves."""
    group = parser.add_argument_group(
        "elastic jobs", "--min-np, --max-np or a script let ranks come and go, over gloo or NCCL."
    )
    group.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        metavar="N",
        help="fewest ranks that training goes on with" + ("" if nodes else " (default: -np)"),
    )
    group.add_argument(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        metavar="N",
        help="most ranks (default: all slots of all hosts)",
    )
    if nodes:
        parser.set_defaults(discovery=None)
    else:
        _add_discovery(group)
    group.add_argument(
        "--reset-limit",
        dest="reset_limit",
        metavar="N",
        help="how often ranks may be numbered anew (default: without end)",
    )
    group.add_argument(
        "--elastic-timeout",
        dest="elastic_timeout",
        metavar="SECONDS",
        help="how long there may be too few ranks (default: RINGLET_ELASTIC_TIMEOUT, else 600)",
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown",
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="seconds after which a host whose rank failed is used again (default: never)",
    )


def _add_discovery(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host-discovery-script",
        dest="discovery",
        metavar="COMMAND",
        help="is run every second and prints the hosts there are, as `host` or `host:slots` a line",
    )
    group.add_argument(
        "--slots-per-host",
        "--slots",
        dest="slots",
        metavar="N",
        help="slots of a host that the script prints without a number (default: 1)",
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Whether any of the flags was given that make a job elastic."""
    return any(each is not None for each in (options.min_np, options.max_np, options.discovery))


def check_cooldown(options: argparse.Namespace) -> None:
    """Raise LaunchError where the cooldown range is no two numbers: the command was one of them."""
    try:
        [float(word) for word in options.cooldown or ()]
    except ValueError:
        raise LaunchError(
            "--blacklist-cooldown-range takes two numbers of seconds, the least first, not"
            f" {' '.join(options.cooldown)}"
        ) from None


def tell_idle(options: argparse.Namespace, title: str, nodes: bool = False) -> None:
    """Say on stderr which flags do nothing, in a job that is not elastic."""
    made = f"{'' if nodes else '--host-discovery-script, '}--min-np and --max-np"
    for name, given in (_RULES if nodes else {**_RULES, "slots": "--slots-per-host"}).items():
        if getattr(options, name) is not None:
            told = f"{title}: {given} does nothing here: only {made} make a job elastic"
            print(told, file=sys.stderr)


def slots_here(options: argparse.Namespace, np: int | None) -> int:
    """Return the slots of this host where no other is named. Raises LaunchError."""
    wanted = [np, *(_number(getattr(options, n), _FLAGS[n], 1) for n in _FLAGS)]
    return max(filter(None, wanted), default=1)


def rules_of(
    options: argparse.Namespace, np: int | None, hosts: Sequence[Host], nodes: bool = False
) -> Rules:
    """Return the rules that the flags state; with ``nodes`` for hosts that come by themselves.

    Raises LaunchError naming the flag that is wrong.
    """
    if nodes and options.min_np is None:
        raise LaunchError("--min-np is missing: how many ranks to begin with, and at least?")
    found = nodes or options.discovery is not None
    slots = sum(host.slots for host in hosts)
    timeout = options.elastic_timeout
    rules = checked_rules(
        np,
        _number(options.min_np, "--min-np", 1),
        _number(options.max_np, "--max-np", 1),
        _number(options.reset_limit, "--reset-limit", 0),
        time_limit("elastic_timeout") if timeout is None else timeout,
        options.cooldown,
        None if found else slots,
        flag,
    )
    if not found and slots < rules.np:
        raise LaunchError(
            f"-np {rules.np}, but --hosts have {slots} slots; name more, or a"
            " --host-discovery-script"
        )
    return rules


def discovery_of(options: argparse.Namespace, hosts: Sequence[Host]) -> Discovery:
    """Return what finds hosts; say on stderr where slots are of none. Raises LaunchError."""
    if options.discovery is not None and hosts:
        raise LaunchError("give --hosts or --host-discovery-script, not both")
    if options.discovery is None and options.slots is not None:
        told = (
            "ringlet run: --slots-per-host does nothing here: it is of hosts that a"
            " --host-discovery-script prints; -H host:slots says it of others"
        )
        print(told, file=sys.stderr)
    slots = _number(options.slots, "--slots-per-host", 1) or 1
    return Discovery(options.discovery, slots, hosts)


def _number(text: str | None, flag: str, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{flag} takes a number of at least {least}, not {text!r}")
    return int(text)
