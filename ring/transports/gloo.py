"""Ranks that find each other through a torch.distributed store and talk gloo (TCP).

A process group of our own is used, never torch's default one, which stays the user's.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import socket
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ringlet.ring.descriptors import allow_more
from ringlet.ring.errors import MORE_THREADS, PeerLost, lacks_threads, unavailable
from ringlet.ring.interrupt import (
    Connections,
    interrupt_all,
    nearest_and_farthest,
    remember,
    watched,
)
from ringlet.ring.rank_order import Scratch
from ringlet.ring.transports.gloo_proof import StoreBarrier, admit
from ringlet.ring.transports.process_group import ProcessGroupCommunicator

_TELL = f"{MORE_THREADS[0].upper()}{MORE_THREADS[1:]}."
LONGEST = 0.5  # seconds that a message takes, whatever a rank may say


class GlooCommunicator(ProcessGroupCommunicator):
    """Rank ``rank`` of ``size`` that meet at ``store``, whose keys must not have been used before.

    ``timeout`` (seconds) bounds each call. The network interface is the one GLOO_SOCKET_IFNAME
    names, else the one that has the address ``host``, else the one of this host's name. Ranks prove
    to each other that they know ``key``; with None, which is then every rank's, nobody does.

    Raises PeerLost when the others cannot be reached, ProtocolError when somebody has taken a
    rank's place, LaunchError when some ranks have a key and others do not.
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
        key: bytes | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be below the size {size}, not {rank}")
        super().__init__(rank, size, origin)
        if not hasattr(self._dist, "ProcessGroupGloo"):
            raise unavailable("gloo", "this torch was built without gloo", "Install another build.")
        self._store, self._timeout, self._host, self._key = store, timeout, host, key
        self._asked = 0  # subsets so far, so that each has keys of its own in the store
        # Runs at exit too, when nobody closed.
        self._finalizer = weakref.finalize(self, self._groups.clear)
        self._connections = Connections()
        _alive.add(self)
        if size > 1:
            self._connect()
            connections = self._connections
            here = json.dumps([socket.gethostname(), connections.ends(), connections.trips()])
            told = map(json.loads, self.allgather_bytes(here.encode()))
            hosts, ends, trips = zip(*told, strict=True)
            connections.introduce(ends, rank)
            self._spread = len(set(hosts)) == size
            nearest, farthest = nearest_and_farthest(ends, trips)
            self._nearest, self._delay = nearest / 2, min(LONGEST, farthest / 2)

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
            key=self._key,
        )

    def interrupt(self) -> None:
        """End the connections of all gloo communicators of this process."""
        interrupt_all()

    def _sibling(self, number: int) -> GlooCommunicator | None:
        # The same connections: what a message belongs to, its tag says.
        sibling = copy.copy(self)
        sibling._tag, sibling._scratch = self._tag + number, Scratch()
        sibling._number = number
        sibling._subsets, sibling._siblings = [], {}
        sibling.before_close = lambda: None
        return sibling

    def _release(self) -> None:
        self._finalizer()

    def severed(self) -> list[int]:
        """Return the ranks to which a connection has ended."""
        return [self.origin[rank] for rank in self._connections.severed()]

    def _close(self) -> None:
        super()._close()
        self._store = None

    def _connect(self) -> None:
        # While its port is open gloo takes every connection, and ends the process when there is no
        # descriptor for one.
        allow_more()
        with watched() as ports:
            options = self._options()
        networks = len(options._devices)
        prefixed = self._dist.PrefixStore("ringlet-gloo", self._store)
        told = prefixed, self.rank, self.size, self._timeout, self.origin
        barrier = StoreBarrier(*told, key=self._key)
        barrier.keyed(self._key is not None)
        barrier.meet()
        # Nobody of the job connects before. The program's threads may, and strangers.
        with watched() as connections:
            try:
                group = self._dist.ProcessGroupGloo(prefixed, self.rank, self.size, options)
            except (RuntimeError, TimeoutError) as error:
                if lacks_threads(error):
                    raise unavailable("gloo", f"rank {self.rank}: {error}", _TELL) from error
                raise PeerLost(
                    f"rank {self.rank} of {self.size} could not reach the others over gloo: {error}"
                ) from error
        connections.listen_at(ports)
        self._groups.append(group)
        self._connections = connections
        del group, options  # what holds them keeps gloo's threads
        try:
            admit(self, barrier, self._key, connections, networks)
        except BaseException:
            self._release()
            raise
        connections.refuse_more()
        remember(self, connections)

    def _options(self) -> Any:
        gloo, host = self._dist.ProcessGroupGloo, self._host
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout)
        options._threads = 1
        interfaces = [i for i in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if i]
        try:
            if interfaces:
                options._devices = [_device(gloo.create_device, interface=n) for n in interfaces]
            elif host:
                options._devices = [_device(gloo.create_device, hostname=host)]
            else:
                options._devices = [_device(gloo.create_default_device)]
        except RuntimeError as error:
            named = "Name a network interface in GLOO_SOCKET_IFNAME."
            remedy = _TELL if lacks_threads(error) else named
            raise unavailable("gloo", str(error).split("\n")[0], remedy) from error
        return options


def _device(make: Any, **where: str) -> Any:
    """Return a device that connects at once, whatever TORCH_GLOO_LAZY_INIT says.

    Connections that came later would not be looked at, and the port would have to stay open.
    """
    try:
        return make(**where, lazy_init=False)
    except TypeError:  # an older torch, where all do
        return make(**where)


_alive: weakref.WeakSet[GlooCommunicator] = weakref.WeakSet()


def _keep_groups() -> None:
    # Their destructors wait for threads that a forked child does not have: it must not destroy any.
    for comm in list(_alive):
        for group in comm._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)
