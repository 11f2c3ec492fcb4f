"""Ray Train's backend: its workers become ranks, with the ranks that Ray Train gives them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from ringlet.job.placed_call import placed_rank
from ringlet.ray.cluster import store_host
from ringlet.ring.errors import LaunchError
from ringlet.ring.placed.ranking import Standing
from ringlet.ring.placed.store_server import StoreServer
from ringlet.ring.placed.ticket import Ticket, asked_of_ranks, tickets

_given: list[Ticket] = []  # in a worker: what it joins the job with when training starts


@dataclass
class RingletConfig(BackendConfig):  # type: ignore[misc]  # Ray may be absent, as below
    """What Ray Train's ``DataParallelTrainer`` takes as ``backend_config``.

    The training function then finds its rank by ``ringlet.torch.init()``, equal to that of
    ``ray.train.get_context()``. ``transport`` is gloo (None) or nccl. ``interfaces`` are network
    interfaces in order of preference; none means the one that leads to the node of Ray Train's
    controller. ``env`` is set for every rank while it trains, such as RINGLET_METRICS. Raises
    LaunchError for a transport that cannot be, or a variable that is misspelt or wrong.
    """

    transport: str | None = None
    interfaces: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Say here what is wrong: raised in Ray Train's controller, Ray's own words come first."""
        asked_of_ranks(self.transport, self.env)

    @property
    def backend_cls(self) -> type[RingletBackend]:
        """Return what Ray Train calls when workers come and go."""
        return RingletBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what Ray Train enters, in its thread, around the training function."""
        return training

    def to_dict(self) -> dict[str, Any]:
        """Return what Ray's dashboard shows."""
        return {"transport": self.transport or "gloo", "interfaces": list(self.interfaces)}


class RingletBackend(Backend):  # type: ignore[misc]
    """Serves the job's store from Ray Train's controller, one for each group of workers."""

    share_cuda_visible_devices = True  # a rank finds its GPU by its local rank
    _server: StoreServer | None = None

    def on_training_start(self, worker_group: Any, backend_config: RingletConfig) -> None:
        """Give every worker its ticket."""
        self._close()
        standings = worker_group.execute(_standing)
        interfaces = backend_config.interfaces
        self._server = StoreServer(len(standings), store_host(interfaces))
        try:
            given = tickets(
                self._server, standings, backend_config.transport, interfaces, backend_config.env
            )
        except LaunchError:
            self._close()
            raise
        ray.get(
            [
                worker_group.execute_single_async(number, _take, ticket)
                for number, ticket in enumerate(given)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: RingletConfig) -> None:
        """Close the store: the workers end, or their training has."""
        self._close()

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _standing() -> Standing:
    from ray.train import get_context

    context = get_context()
    return Standing(
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
    )


def _take(ticket: Ticket) -> None:
    _given[:] = [ticket]


@contextmanager
def training() -> Iterator[None]:
    """Let a worker of Ray Train be the rank that it has a ticket for."""
    if not _given:
        raise LaunchError(
            "this worker has no place in a job: ringlet.ray.RingletConfig needs Ray Train V2"
            " (RAY_TRAIN_V2_ENABLED=1, which is Ray's default from 2.51 on)"
        )
    with contextlib.closing(_Emptied()), placed_rank(_given[-1]):
        yield


class _Emptied:
    def close(self) -> None:
        _given.clear()
