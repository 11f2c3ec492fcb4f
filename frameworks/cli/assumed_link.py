"""A link between hosts that one does not have, as ``ringlet doctor --link`` takes it."""

from __future__ import annotations

import math
import re
from contextlib import suppress

from ringlet.job.link_settings import parse_link
from ringlet.ring.command.cli import UsageError
from ringlet.ring.cost.link_probe import MeasuredLink

_RATE = re.compile(r"\s*([0-9.]+)\s*([kmgtKMGT]?)([bB]it|B)(?:/s)?\s*")
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def assumed_link(text: str) -> MeasuredLink:
    """Read ``1gbit``, or what RINGLET_LINK takes: ``100us,1Gbit/s``. Raises UsageError."""
    latency, rate = 0.0, 0.0
    found = _RATE.fullmatch(text)
    with suppress(ValueError):  # what is left at 0 is no link
        if found is None:
            link = parse_link(text)
            latency, rate = link.latency, link.bandwidth
        else:
            unit = 1.0 if found[3] == "B" else 1 / 8
            rate = float(found[1]) * _PREFIX[found[2].lower()] * unit
    if not 0 < rate < math.inf:
        raise UsageError(
            f"--link {text!r} names no link: write 1gbit, 100mbit or 125MB/s, or a latency too, as"
            " in 100us,1Gbit/s"
        )
    return MeasuredLink("any host", "any other", latency, rate)


def assumed_hosts(hosts: list[str]) -> list[str]:
    """Return where ranks are taken to be: where they are, or each on a host of its own.

    The latter where there is one host alone, which has no link.
    """
    if len(set(hosts)) > 1:
        return hosts
    return [f"host{rank}" for rank in range(len(hosts))]
