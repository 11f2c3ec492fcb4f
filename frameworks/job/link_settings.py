"""What a job is told of the network between its hosts; rank 0's environment counts.

RINGLET_LINK names the link between hosts, as in ``100us,1Gbit/s``, or says ``measure``; collectives
of compressed tensors are chosen by it. RINGLET_HIERARCHICAL_ALLREDUCE lets large allreduces add up
inside every host before they leave it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from ringlet.fusion.limits import UNKNOWN, Link
from ringlet.ring.communicator import Communicator, Topology
from ringlet.ring.cost.link_probe import measure_links
from ringlet.ring.errors import RingError
from ringlet.ring.transports.hierarchical import by_host, two_levels
from ringlet.ring.variables import MEASURE, read_link

log = logging.getLogger("ringlet")

_ROUNDS = 15
_SECONDS = (0.15, 1.5)  # to fill a link for; the second where the first is too short for it


def parse_link(text: str) -> Link:
    """Read a latency and a bandwidth, as in ``"100us,1Gbit/s"``. Raises ValueError."""
    return Link(*read_link("RINGLET_LINK", text))


def measured_link(comm: Communicator, hosts: Sequence[str]) -> Link:
    """Measure how fast this job's hosts speak with each other; collective, the same on every rank.

    ``hosts`` is the host of every rank. The bandwidth is that of one TCP connection from the first
    host to the second; the latency is a message's as the cost model counts them, over the transport
    and on these busy machines, which is far more than a ping takes. Takes less than 0.3 s on a link
    of 100 Mbit/s or more, and up to 2 s on a slower one. Both are rounded to powers of two, so that
    restarts on one network mostly agree. Unknown when there is one host. Raises RingError when
    nothing could be measured.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return UNKNOWN
    why = "it carries too little"
    for seconds in _SECONDS:
        (found,) = measure_links(comm, hosts, seconds, [(names[0], names[1])])
        if found.error:
            why = found.error
            break
        if found.rate > 0:
            link = Link(_power_of_two(_message(comm)), _power_of_two(found.rate))
            if comm.rank == 0:
                told = f"{1e6 * link.latency:.3g}us,{8e-6 * link.bandwidth:.4g}Mbit/s"
                log.info("measured %s -> %s: RINGLET_LINK=%s", names[0], names[1], told)
            return link
    raise RingError(
        f"RINGLET_LINK={MEASURE}: the link {names[0]} -> {names[1]} could not be measured: {why}."
        " Name it, as in RINGLET_LINK=100us,1Gbit/s, or leave the variable out"
    )


def hierarchical(comm: Communicator, topology: Topology) -> Communicator:
    """Return ``comm`` with allreduces over two levels, or itself where that makes no sense.

    Collective. Rank 0 warns when hosts have different numbers of ranks.
    """
    places = by_host(topology.hosts)
    if len({len(ranks) for ranks in places}) > 1 and comm.rank == 0:
        found = ", ".join(f"{len(ranks)} on {topology.hosts[ranks[0]]}" for ranks in places)
        log.warning(
            "hierarchical allreduces need as many ranks on every host; there are %s. Allreduces"
            " stay flat",
            found,
        )
    return two_levels(comm, topology)


def _message(comm: Communicator) -> float:
    """Return the seconds that a small all-gather takes for each rank it hears of."""
    own, everybody = np.zeros(1), np.empty(comm.size)
    times = []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        comm.allgather(own, everybody)
        times.append(time.perf_counter() - begin)
    own[0] = statistics.median(times[1:]) / (comm.size - 1)  # the first one may connect
    comm.allgather(own, everybody)
    return statistics.median(everybody.tolist())


def _power_of_two(x: float) -> float:
    return 2.0 ** round(math.log2(x))
