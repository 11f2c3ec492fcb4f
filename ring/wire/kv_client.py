"""The job's store as ranks see it: small values by name, kept by the launcher.

torch's own TCPStore lets in whoever can connect. This one goes over the launcher's authenticated
channel: client and launcher each prove that they know the job's key, and every message is bounded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

from ringlet.ring.errors import LaunchError, PeerLost, ProtocolError
from ringlet.ring.wire.entry import PATIENCE, enter
from ringlet.ring.wire.keys import MEMBER, STORE_KEY
from ringlet.ring.wire.kv_store import PIECE, REFUSED, Op, pack, unpack
from ringlet.ring.wire.launch_link import LARGE, Kind

SCHEME = "ringlet://"
TIMEOUT = 300.0  # seconds that a value may be waited for


class Client:
    """A rank's connection to the store at ``address`` (host:port). For any thread.

    Raises LaunchError when the launcher is gone, PeerLost when it says that a value will not come,
    TimeoutError when it does not appear.
    """

    def __init__(self, address: str, key: bytes, rank: int, patience: float = PATIENCE) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._where = address
        try:
            self._channel = enter(address, key, rank, visitor=True, patience=patience)
        except (OSError, ProtocolError) as error:
            raise LaunchError(
                f"rank {rank} cannot reach the launcher's store at {address}: {error}"
            ) from error

    def ask(self, op: Op, *fields: bytes, timeout: float | None = TIMEOUT) -> bytes:
        """Send a request and return the answer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._send(op, fields)
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                if not self._channel.wait(left) and not self._channel.closed:
                    names = ", ".join(field.decode(errors="replace") for field in fields)
                    raise TimeoutError(f"{names} did not appear in the store for {timeout:g} s")
                for kind, answer in self._channel.receive():
                    said, number, values = unpack(answer)
                    if kind is Kind.ANSWER and number == self._number:
                        if said == REFUSED:
                            raise PeerLost(values[0].decode(errors="replace"))
                        return values[0]
                if self._channel.closed:
                    raise self._gone()

    def tell(self, op: Op, *fields: bytes) -> None:
        """Send a request whose answer nobody waits for."""
        with self._lock:
            while self._channel.wait(0):
                list(self._channel.receive())  # the answers to earlier ones
            if self._channel.closed:
                raise self._gone()
            self._send(op, fields)

    def leave(self, name: str, value: bytes) -> None:
        """Leave a value of any length for the launcher; it is there as a whole or not at all."""
        pieces = range(0, len(value), PIECE)
        for i, start in enumerate(pieces):
            self.ask(Op.SET, f"{name}/{i}".encode(), value[start : start + PIECE])
        self.ask(Op.SET, name.encode(), b"%d" % len(pieces))

    def fetch(self, name: str) -> bytes:
        """Return a value of any length that the launcher has left."""
        count = int(self.ask(Op.GET, name.encode()))
        return b"".join(self.ask(Op.GET, f"{name}/{i}".encode()) for i in range(count))

    @property
    def own_address(self) -> str:
        """This host's address, as it leads to the store."""
        return self._channel.own_address

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _send(self, op: Op, fields: Sequence[bytes]) -> None:
        self._number += 1
        body = pack(op, self._number, fields)
        if len(body) > LARGE:
            raise ValueError(f"a store request of {len(body)} bytes is over {LARGE}")
        self._channel.send(Kind.ASK, body)

    def _gone(self) -> LaunchError:
        return LaunchError(f"the launcher's store at {self._where} is gone")


# By address, key, rank and process; and what torch knows each as.
_clients: dict[tuple[str, str, int, int], Client] = {}
_stores: dict[Client, Any] = {}


def client(env: Mapping[str, str] | None = None) -> Client:
    """Return this process's connection to the store that its environment names."""
    env = os.environ if env is None else env
    place, key = env["RINGLET_RENDEZVOUS"], env.get(STORE_KEY)
    if key is None:
        raise LaunchError(f"RINGLET_RENDEZVOUS={place} is set but {STORE_KEY} is not")
    # A forked child must not talk in between on its parent's connection.
    number = int(env.get(MEMBER) or env["RINGLET_RANK"])
    place = place.removeprefix(SCHEME)
    known = place, key, number, os.getpid()
    if known not in _clients:
        _clients[known] = Client(place, bytes.fromhex(key), number)
    return _clients[known]


def forget(address: str) -> None:
    """Close this process's connections to the store at ``address``: its job is over."""
    for known in [known for known in _clients if known[0] == address]:
        connection = _clients.pop(known)
        _stores.pop(connection, None)
        connection.close()


def torch_store(connection: Client) -> Any:
    """Return ``connection`` as a ``torch.distributed.Store``, as gloo needs one.

    One object for each connection, which is kept: torch holds on to its C++ half alone, which is
    of no use once the Python half has gone.
    """
    if connection not in _stores:
        _stores[connection] = _torch_store(connection)
    return _stores[connection]


def _torch_store(connection: Client) -> Any:
    dist: Any = import_module("torch.distributed")

    class JobStore(dist.Store):  # type: ignore[misc]  # torch may be absent when types are checked
        """What ProcessGroupGloo and PrefixStore call, by names of torch's choosing."""

        def set(self, key: str, value: bytes | str) -> None:
            connection.ask(Op.SET, key.encode(), _bytes(value))

        def get(self, key: str) -> bytes:
            return connection.ask(Op.GET, key.encode(), timeout=self._seconds())

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            seconds = self._seconds() if timeout is None else timeout.total_seconds()
            connection.ask(Op.WAIT, *(key.encode() for key in keys), timeout=seconds)

        def check(self, keys: list[str]) -> bool:
            return connection.ask(Op.CHECK, *(key.encode() for key in keys)) == b"1"

        def add(self, key: str, value: int) -> int:
            return int(connection.ask(Op.ADD, key.encode(), b"%d" % value))

        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            return connection.ask(Op.COMPARE, key.encode(), _bytes(expected), _bytes(desired))

        def append(self, key: str, value: bytes | str) -> None:
            connection.ask(Op.APPEND, key.encode(), _bytes(value))

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def delete_key(self, key: str) -> bool:
            return connection.ask(Op.DELETE, key.encode()) == b"1"

        def num_keys(self) -> int:
            return int(connection.ask(Op.COUNT))

        deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  # so called from C++

        def has_extended_api(self) -> bool:
            return True

        def clone(self) -> Any:
            return self

        def _seconds(self) -> float:
            return min(TIMEOUT, float(self.timeout.total_seconds()))

    return JobStore()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
