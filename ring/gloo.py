"""Ranks that find each other through a torch.distributed store and talk gloo (TCP).

A process group of our own is used, never torch's default one, which stays the user's.
"""

from __future__ import annotations

import copy
import os
import socket
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ringlet.ring.errors import PeerLost, unavailable
from ringlet.ring.halves import Scratch
from ringlet.ring.interrupt import interrupt_all, remember, watched
from ringlet.ring.process_group import TAG, ProcessGroupCommunicator


class GlooCommunicator(ProcessGroupCommunicator):
    """Rank ``rank`` of ``size`` that meet at ``store``, whose keys must not have been used before.

    ``timeout`` (seconds) bounds each call. The network interface is the one GLOO_SOCKET_IFNAME
    names, else the one that has the address ``host``, else the one of this host's name.
    """

    name = "gloo"

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float = 300.0,
        *,
        host: str | None = None,
        origin: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be below the size {size}, not {rank}")
        super().__init__(rank, size, origin)
        if not hasattr(self._dist, "ProcessGroupGloo"):
            raise unavailable("gloo", "this torch was built without gloo", "Install another build.")
        self._store, self._timeout, self._host = store, timeout, host
        self._asked = 0  # subsets so far, so that each has keys of its own in the store
        # Runs at exit too, when nobody closed.
        self._finalizer = weakref.finalize(self, self._groups.clear)
        if size > 1:
            self._groups.append(self._connect())
            hosts = self.allgather_bytes(socket.gethostname().encode())
            self._spread = len(set(hosts)) == size

    def _subset(self, ranks: list[int]) -> GlooCommunicator | None:
        self._asked += 1
        if self.rank not in ranks:
            return None
        store = None
        if len(ranks) > 1:
            store = self._dist.PrefixStore(f"ringlet-subset/{self._asked}", self._store)
        origin = [self.origin[rank] for rank in ranks]
        return GlooCommunicator(
            store,
            ranks.index(self.rank),
            len(ranks),
            self._timeout,
            host=self._host,
            origin=origin,
        )

    def interrupt(self) -> None:
        """End the connections of all gloo communicators of this process."""
        interrupt_all()

    def _sibling(self, number: int) -> GlooCommunicator | None:
        # The same connections: what a message belongs to, its tag says.
        sibling = copy.copy(self)
        sibling._tag, sibling._scratch = TAG + number, Scratch()
        sibling._subsets, sibling._siblings = [], {}
        sibling.before_close = lambda: None
        return sibling

    def _release(self) -> None:
        self._finalizer()

    def _close(self) -> None:
        super()._close()
        self._store = None

    def _connect(self) -> Any:
        gloo, host = self._dist.ProcessGroupGloo, self._host
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout)
        options._threads = 1
        interfaces = [i for i in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if i]
        try:
            if interfaces:
                options._devices = [gloo.create_device(interface=name) for name in interfaces]
            elif host:
                options._devices = [gloo.create_device(hostname=host)]
            else:
                options._devices = [gloo.create_default_device()]
        except RuntimeError as error:
            remedy = "Name a network interface in GLOO_SOCKET_IFNAME."
            raise unavailable("gloo", str(error).split("\n")[0], remedy) from error
        prefixed = self._dist.PrefixStore("ringlet-gloo", self._store)
        try:
            with watched() as connections:
                group = gloo(prefixed, self.rank, self.size, options)
        except RuntimeError as error:
            text = f"rank {self.rank} of {self.size} could not reach the others over gloo: {error}"
            raise PeerLost(text) from error
        remember(self, connections)
        return group
