"""What the driver of Ray, Spark or Dask hands each worker, so that it can join the job."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringlet.ring.errors import LaunchError
from ringlet.ring.placed.ranking import Standing, across_nodes, standings
from ringlet.ring.placed.store_server import StoreServer
from ringlet.ring.rendezvous.environment import check_transport
from ringlet.ring.variables import check


@dataclass(frozen=True)
class Ticket:
    """A rank's ``standing``, where the store is, the key to it, and variables of the job.

    The key lets its holder into the job: tickets belong on channels that the engine protects.
    """

    standing: Standing
    address: str
    key: str = field(repr=False)
    transport: str = "gloo"
    interfaces: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # it may hold credentials

    def with_gpus(self, gpus: Iterable[str]) -> Ticket:
        """Return this ticket with the GPUs that the engine gave all ranks of the node.

        As a launcher leaves it: every rank sees all of them, unless ``env`` says what it sees.
        """
        visible = ",".join(sorted(set(gpus), key=lambda gpu: (len(gpu), gpu)))
        if not visible or "CUDA_VISIBLE_DEVICES" in self.env:
            return self
        return replace(self, env={**self.env, "CUDA_VISIBLE_DEVICES": visible})


def tickets(
    server: StoreServer,
    nodes: Sequence[Hashable] | Sequence[Standing],
    transport: str | None = None,
    interfaces: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[Ticket]:
    """Return a ticket for each process, whose nodes (see ``standings``) or standings are given.

    ``transport`` is gloo (None) or nccl; ``env`` is set for every rank. Raises LaunchError for a
    transport that placed ranks cannot have, or a variable that is misspelt or wrong.
    """
    chosen, given = asked_of_ranks(transport, env)
    placed = [n for n in nodes if isinstance(n, Standing)]
    found = across_nodes(placed) if len(placed) == len(nodes) else standings(nodes)
    key, own = server.key.hex(), tuple(interfaces)
    return [Ticket(each, server.address, key, chosen, own, given) for each in found]


def asked_of_ranks(
    transport: str | None, env: Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """Return the transport of placed ranks and what is set for them. Raises LaunchError."""
    given = dict(env or {})
    chosen = transport or given.pop("RINGLET_TRANSPORT", None) or "gloo"
    if check_transport(chosen) not in ("gloo", "nccl"):
        raise LaunchError(
            f"transport {chosen!r} cannot join ranks in the workers of an engine: MPI wants to"
            " start them itself, and 'local' joins threads; use gloo or nccl"
        )
    if wrong := [name for name, value in given.items() if not isinstance(value, str)]:
        raise LaunchError(f"env: the value of {wrong[0]} is {given[wrong[0]]!r}, which is no text")
    try:
        check({**_own(os.environ), **given})
    except ValueError as error:
        raise LaunchError(str(error)) from None
    return chosen, given


def _own(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(("RINGLET_", "HOROVOD_"))}
