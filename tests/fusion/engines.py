"""Engines on in-process ranks."""

from ringlet.fusion import Engine, Limits
from ringlet.ring import Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.local import run_local


def with_engines(size, body, over=lambda comm: comm, **limits):
    """Return what ``body(engine)`` returns on each of ``size`` ranks, with these ``limits``.

    Engines use what ``over`` makes of a rank's communicator.
    """

    def rank_main(comm):
        engine = Engine(over(comm), open_control, Limits(**limits))
        try:
            return body(engine)
        finally:
            engine.shutdown()

    return run_local(rank_main, size)


def on_hosts(hosts, body, levels=HierarchicalCommunicator, **limits):
    """Run ``body(engine)`` on ranks that are on ``hosts``; return the results by rank."""

    def two(comm):
        return levels(comm, Topology.from_hosts(comm.rank, hosts))

    return with_engines(len(hosts), body, two, **limits)
