"""The job's store without a launcher: a thread of the driver serves it to ranks that others start.

It is the store that ``ringlet run`` has: who comes proves to know the job's key.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Sequence

from ringlet.ring.descriptors import allow_more
from ringlet.ring.wire.kv_store import KvStore
from ringlet.ring.wire.launch_link import store_key
from ringlet.ring.wire.listener import Listener

FAILED = "placed/failed"  # what a rank that fails leaves: its number, and why


class StoreServer:
    """A store for ``size`` ranks, which listens on the address ``host`` until it is closed.

    ``address`` (host:port) and ``key`` are what ranks need. Once a rank has said that it failed,
    nobody waits for what it would have left.
    """

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        allow_more()  # one for each rank
        self._listener = Listener(size, host)
        self.address, self.key = self._listener.address, store_key(self._listener.secret)
        self._store = KvStore()
        self._lock = threading.Lock()
        self._failed = False
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="ringlet-store", daemon=True)
        self._thread.start()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fail(self, why: str) -> None:
        """Tell ranks that wait for others, or will, that these do not come."""
        with self._lock:
            self._failed = True
            self._store.refuse("", why)

    def has(self, names: Sequence[str]) -> bool:
        """Whether ranks have left a value under each of ``names``."""
        with self._lock:
            return all(self._store.value(name) is not None for name in names)

    def close(self) -> None:
        """Send everybody away, and listen no more. Idempotent."""
        with contextlib.suppress(OSError):
            self._waker.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        with contextlib.closing(self._listener), contextlib.closing(self._store):
            while True:
                ready = self._wait()
                if self._woken.fileno() in ready:
                    self._woken.close()
                    return
                with self._lock:
                    for guest in self._listener.admit(ready):
                        if guest.visitor:
                            self._store.admit(guest)
                        else:
                            guest.channel.close()  # nobody starts wrappers here
                    self._store.serve(ready)
                    self._spread_failure()

    def _wait(self) -> set[int]:
        poll = select.poll()
        for source in (self._woken.fileno(), *self._listener.sources()):
            poll.register(source, select.POLLIN)
        with self._lock:
            for channel in self._store.channels():
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.pending else 0))
            patience = self._listener.patience()
        timeout = None if patience is None else 1000 * patience
        return {descriptor for descriptor, _ in poll.poll(timeout)}

    def _spread_failure(self) -> None:
        said = None if self._failed else self._store.value(FAILED)
        if said is not None:
            self._failed = True
            try:
                rank, why = json.loads(said)
            except (ValueError, TypeError, RecursionError):  # the store serves the others yet
                rank, why = "that cannot be told", "it has left no reason that can be read"
            self._store.refuse("", f"rank {rank} has failed: {why}")
