"""The launcher of an elastic job whose two members have begun, without processes."""

from __future__ import annotations

from typing import Any

from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.driver import Driver, _Attended
from ringlet.ring.elastic.rules import Rules
from ringlet.ring.elastic.signs_of_life import SignsOfLife
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.rank_table import Rank, RankTable


def driver_of(ranks: list[Rank], printer: Any) -> Driver:
    """Return the driver of two ``ranks`` on one host, who have asked to begin, and have met."""
    hosts = [Host("a", 2)]
    driver = Driver(["true"], Rules(2, 1), Discovery(None, hosts=hosts), "gloo", {}, Reach())
    driver._printer = printer
    driver._rank_table = RankTable(ranks, printer, driver._task, clock=driver._clock)
    driver._signs = SignsOfLife(driver._membership, driver._rank_table, 0.0)
    driver._attended = {n: _Attended() for n in range(2)}
    members = driver._membership
    members.hosts_found(hosts, 0.0)
    for member in members.decide(0.0).start:
        members.asks(member.number, (), 0.0)
    for number in members.decide(0.0).seats:
        members.meets(number, 1)
    return driver
