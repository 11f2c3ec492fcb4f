"""Where wrappers report to their launcher: a port, on one address, that knows the job's secret."""

from __future__ import annotations

import errno
import resource
import secrets
from dataclasses import dataclass

from ringlet.ring.wire.addresses import listen, with_port
from ringlet.ring.wire.admission import Admission
from ringlet.ring.wire.handshake import Claim
from ringlet.ring.wire.launch_link import Channel, Role, store_key

PATIENCE = 10.0  # seconds that strangers have to prove themselves
CONNECTIONS = 2  # of a rank: its wrapper's, and its program's to the store
BACKLOG = 1024  # connections that wait until they are taken, at least


@dataclass(frozen=True)
class Guest:
    """Somebody who has been let in: the wrapper of ``rank``, or a visitor to the store."""

    rank: int
    channel: Channel
    visitor: bool


class Listener:
    """Listens on ``host`` and lets in, as a rank below ``size``, who proves to know the secret.

    Visitors to the store prove that they know the store's key, which is derived from the secret.
    ``port`` and ``secret`` (32 bytes) are chosen here unless they are given. ``Admission`` says who
    has to go when there are too many strangers, or no descriptor is left.
    """

    def __init__(
        self, size: int, host: str = "127.0.0.1", port: int = 0, secret: bytes | None = None
    ) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self._size = size
        self._key = store_key(self.secret)
        listener = listen(host, max(BACKLOG, CONNECTIONS * size), port)
        self.address = with_port(host, listener.getsockname()[1])
        self._admission = Admission(listener, self._secret_of, CONNECTIONS * size, PATIENCE)
        self._told = False  # whether it was told that nobody is let in

    @property
    def size(self) -> int:
        """The number of ranks, which changes in an elastic job."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        self._admission.expect(CONNECTIONS * size)

    def sources(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [self._admission.fileno()]

    def patience(self) -> float | None:
        """Return for how many seconds nobody's time is up, None for ever."""
        return self._admission.time_left()

    def complaint(self) -> str:
        """Return, once, why nobody is let in any more; empty while all is well."""
        if self._told or self._admission.shortage is None:
            return ""
        self._told = True
        return _no_descriptors(self._admission.shortage)

    def admit(self, ready: set[int]) -> list[Guest]:
        """Serve what is ``ready``; return who is let in. Everybody else is turned away."""
        if self._admission.fileno() not in ready and self._admission.time_left() != 0.0:
            return []
        return [
            Guest(each.who.rank, Channel(each.sock, each.keys), each.who.role == Role.VISITOR)
            for each in self._admission.serve()
        ]

    def _secret_of(self, who: Claim) -> bytes | None:
        secrets_of = {int(Role.WRAPPER): self.secret, int(Role.VISITOR): self._key}
        return secrets_of.get(who.role) if who.rank < self.size else None

    def close(self) -> None:
        """Close the port and every connection that was not admitted."""
        self._admission.close()


def _no_descriptors(error: OSError) -> str:
    if error.errno == errno.ENFILE:
        return "this host has no descriptors left, so ranks cannot connect to the launcher"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (
        f"ranks cannot connect to the launcher, which has all of the {limit} descriptors that it"
        " may have: allow it more (`ulimit -n` in the shell that starts it), four for each rank"
    )
