"""``ringlet.run`` where ranks come and go: who they are, and the results of the last of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.driver import Driver
from ringlet.ring.elastic.rules import Rules, checked_rules
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions.parcels import failure, result
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.launch.time_limits import time_limit
from ringlet.ring.processes.output import Printer


def elastic_plan(
    np: int | None,
    hosts: Sequence[Host],
    *,
    min_np: int | None = None,
    max_np: int | None = None,
    host_discovery_script: str | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    elastic_timeout: float | None = None,
    cooldown_range: Sequence[float] | None = None,
) -> tuple[Rules, Discovery] | None:
    """Return the rules and what finds hosts; None where nothing says that ranks come and go.

    Arguments are those of ``ringlet.run``. Raises LaunchError for what contradicts.
    """
    rules = {
        "reset_limit": reset_limit,
        "elastic_timeout": elastic_timeout,
        "cooldown_range": cooldown_range,
    }
    if min_np is None and max_np is None and host_discovery_script is None:
        for name, value in {**rules, "slots": slots}.items():
            if value is not None:
                raise LaunchError(
                    f"{name} is for ranks that come and go: give min_np, max_np or a"
                    " host_discovery_script as well"
                )
        return None
    if slots is not None and (not isinstance(slots, int) or slots < 1):
        raise LaunchError(f"slots takes a number of at least 1, not {slots!r}")
    if host_discovery_script is not None and hosts:
        raise LaunchError("give hosts or a host_discovery_script, not both")
    known = None
    if host_discovery_script is None:
        numbers = [n for n in (np, min_np, max_np) if isinstance(n, int)]
        hosts = hosts or [Host("localhost", max([1, *numbers]))]
        known = sum(host.slots for host in hosts)
    if elastic_timeout is None:
        elastic_timeout = time_limit("elastic_timeout")
    checked = checked_rules(np, min_np, max_np, reset_limit, elastic_timeout, cooldown_range, known)
    if known is not None and known < checked.np:
        raise LaunchError(f"{checked.np} ranks are to begin, but the hosts have {known} slots")
    return checked, Discovery(host_discovery_script, slots or 1, hosts)


def elastic_results(driver: Driver, printer: Printer, call: bytes, verbose: bool) -> list[Any]:
    """Run the job; return what the last ranks returned, by rank.

    Raises WorkerFailed where the job fails, with the traceback of the rank that failed first.
    """
    outcome = driver.run(printer, verbose, {"call": call})
    if outcome.interrupted:
        raise KeyboardInterrupt
    store = driver.kv_store
    if outcome.code:
        if outcome.failed is None:
            raise LaunchError(outcome.reason)
        raise failure(store, outcome.failed, driver.rank_of(outcome.failed), outcome.reason)
    return [result(store, driver.key, who, driver.rank_of(who)) for who in outcome.returned]
