"""The flags of an elastic job, which are horovodrun's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.membership import Rules
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host

_FLAGS = {"min_np": "--min-np", "max_np": "--max-np"}


def add_elastic(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    group = parser.add_argument_group(
        "elastic jobs", "Any of these lets ranks come and go, over gloo or NCCL."
    )
    group.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        metavar="N",
        help="fewest ranks that training goes on with (default: -np)",
    )
    group.add_argument(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        metavar="N",
        help="most ranks (default: all slots of all hosts)",
    )
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
        help="how long there may be too few ranks (default: 600)",
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown",
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="seconds after which a host whose rank failed is used again (default: never)",
    )


def is_elastic(options: argparse.Namespace) -> bool:
    """Whether any of the flags was given that make a job elastic."""
    return any(each is not None for each in (options.min_np, options.max_np, options.discovery))


def slots_here(options: argparse.Namespace, np: int | None) -> int:
    """Return the slots of this host where no other is named. Raises LaunchError."""
    wanted = [np, *(_number(getattr(options, n), _FLAGS[n], 1) for n in _FLAGS)]
    return max(filter(None, wanted), default=1)


def rules_of(options: argparse.Namespace, np: int | None, hosts: Sequence[Host]) -> Rules:
    """Return the rules that the flags state. Raises LaunchError naming the flag that is wrong."""
    known = sum(host.slots for host in hosts)
    min_np = _number(options.min_np, "--min-np", 1)
    max_np = _number(options.max_np, "--max-np", 1)
    start = np or min_np or known or None
    if start is None:
        raise LaunchError("an elastic job needs -np or --min-np: how many ranks to begin with?")
    least = min_np or start
    if start < least or (max_np is not None and max_np < start):
        most = "" if max_np is None else f", --max-np {max_np}"
        raise LaunchError(f"--min-np {least}, -np {start}{most}: must not fall in this order")
    if options.discovery is None and known < start:
        raise LaunchError(
            f"-np {start}, but --hosts have {known} slots; name more, or a --host-discovery-script"
        )
    cooldown = None
    if options.cooldown is not None:
        low, high = (_seconds(text, "--blacklist-cooldown-range") for text in options.cooldown)
        if not 0 < low <= high:
            raise LaunchError(
                "--blacklist-cooldown-range takes two numbers of seconds, the least first, not "
                f"{low:g} {high:g}"
            )
        cooldown = low, high
    timeout = 600.0
    if options.elastic_timeout is not None:
        timeout = _seconds(options.elastic_timeout, "--elastic-timeout")
    return Rules(
        start,
        least,
        max_np,
        _number(options.reset_limit, "--reset-limit", 0),
        timeout,
        cooldown,
        fixed=options.discovery is None,
    )


def discovery_of(options: argparse.Namespace, hosts: Sequence[Host]) -> Discovery:
    """Return what finds hosts. Raises LaunchError."""
    if options.discovery is not None and hosts:
        raise LaunchError("give --hosts or --host-discovery-script, not both")
    slots = _number(options.slots, "--slots-per-host", 1) or 1
    return Discovery(options.discovery, slots, hosts)


def _number(text: str | None, flag: str, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{flag} takes a number of at least {least}, not {text!r}")
    return int(text)


def _seconds(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise LaunchError(f"{flag} takes seconds, not {text!r}")
    return value
