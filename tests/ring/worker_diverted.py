"""A rank whose address somebody changes in the store: ``worker_diverted.py STORE RANK SIZE HOST``.

With a fifth argument, ``ADDRESS:PORT``, the others find that one instead of this rank's own, as
where somebody writes into torch's TCPStore. Prints what it has heard, or what went wrong.
"""

import os
import re
import socket
import struct
import sys

import torch.distributed as dist

from ringlet.ring import RingError
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.wire.keys import job_key

_ADDRESS = re.compile(rb"\x02\x00..\x7f...", re.DOTALL)  # a sockaddr_in of loopback


class Changed(dist.Store):  # type: ignore[misc]
    """A FileStore in which this rank's address is ``place``."""

    def __init__(self, store: dist.Store, place: str) -> None:
        super().__init__()
        host, _, port = place.partition(":")
        self._store = store
        self._place = struct.pack("<H", socket.AF_INET) + struct.pack("!H", int(port))
        self._place += socket.inet_aton(host)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if "proof" not in key:
            data = _ADDRESS.sub(lambda _: self._place, data, 1)
        self._store.set(key, data)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def wait(self, keys, timeout=None) -> None:  # type: ignore[no-untyped-def]
        self._store.wait(keys, *(() if timeout is None else (timeout,)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))


rank, size, host = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store: dist.Store = dist.FileStore(sys.argv[1], size)
if len(sys.argv) > 5:
    store = Changed(store, sys.argv[5])
try:
    key = job_key(os.environ)
    comm = GlooCommunicator(store, rank, size, timeout=60.0, host=host, key=key)
    heard = comm.broadcast_bytes(b"the job's secret" if rank == 0 else None).decode()
    print(f"{heard}, of {len(comm._connections.ends())} known connection", flush=True)
    comm.close()
except RingError as error:
    print(type(error).__name__, error, flush=True)
