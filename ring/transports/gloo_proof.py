"""The proof, at the start of a gloo group, that every connection leads to the rank it should.

gloo takes whoever connects first and says a small number for the rank that it waits for. So before
anything else travels, ranks challenge each other on each connection: both ends prove that they know
the job's key, together with the name of the group, both ranks and a fresh number of either. A proof
holds for one direction of one connection of one group, so it is of no use anywhere else.

Somebody who changes addresses in the store could still have all of this go through himself. So
ranks then tell each other, under the key, where they are reached and what they have reached:
between any two of them a connection has to lead from the one to the other.

Where ranks meet (the store) they tell each other how it went, so that a rank whose place was taken,
and who therefore waits for an answer that will never come, learns of it, and all raise one error.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np

from ringlet.ring.communicator import Communicator
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import LaunchError, PeerLost, ProtocolError, RingError
from ringlet.ring.interrupt import Connections
from ringlet.ring.wire.framing import derive, genuine, seal, unseal
from ringlet.ring.wire.keys import SECRET

PATIENCE = 60.0  # seconds for the proofs, once all ranks are connected
LONGEST = 2000  # characters of what a step has failed of
LISTED = 6  # ranks that a sentence names
LOOK = 0.05  # seconds between two looks at what the others say
NONCE = 32
PROOF = 64  # characters in front of what a rank says: a proof, or blanks without a key
_WELL, _TAKEN, _LOST = "well", "taken", "lost"  # how a step has ended for the ranks together


class StoreBarrier:
    """Where the ranks of a group wait for each other, in their store; ``name`` is the group's.

    ``timeout`` (seconds) bounds every wait. A rank that fails says so once, under the job's ``key``
    if it has one; then everybody fails. ``origin`` are the group's ranks as the job numbers them.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        origin: Sequence[int] | None = None,
        key: bytes | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._key = None if key is None else derive(key, "gloo said")
        self._origin = tuple(range(size) if origin is None else origin)
        self._timeout = timedelta(seconds=timeout)
        if rank == 0:
            store.set("proof/name", secrets.token_bytes(NONCE))

    @property
    def name(self) -> bytes:
        """What no other group is called."""
        self._wait("proof/name")
        return bytes(self._store.get("proof/name"))

    def keyed(self, has: bool) -> None:
        """Note whether this rank has a key."""
        self._store.add("proof/keys", int(has))

    def keys(self) -> int:
        """Return how many ranks have one."""
        return int(self._store.add("proof/keys", 0))

    def meet(self) -> None:
        """Wait until all ranks have come; PeerLost names those who have not, alike on every rank.

        Until then nobody connects: who waits in gloo cannot tell for whom.
        """
        self._store.set(f"proof/here {self._rank}", _WELL)
        if self._store.add("proof/here", 1) == self._size:
            self._settle(())
        if missed := self._missed("proof/all here"):
            try:
                self._settle(self._absent())
            except RuntimeError:  # whoever keeps the store has gone
                raise missed from missed.__cause__
        try:
            self._hear("here")
        except PeerLost as error:
            absent: list[int] = []
            with suppress(RuntimeError):
                absent = [self._origin[rank] for rank in self._absent()]
            raise PeerLost(str(error), absent) from None

    def _settle(self, absent: Sequence[int]) -> None:
        """Have everybody go on without waiting longer, or fail if ranks are ``absent``.

        Whoever is first to settle it, does so for all: the last rank may come at the same time.
        """
        said = f"{_LOST} {self._not_come(absent)}".encode()
        self._store.compare_set("proof/all here", "", self._signed(said) if absent else _WELL)

    def _absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return [r for r in range(self._size) if not self._store.check([f"proof/here {r}"])]

    def _not_come(self, absent: Sequence[int]) -> str:
        everybody = self._origin == tuple(range(self._size))
        where = "init()" if everybody else f"the group of {_ranks(self._origin)}"
        have = "have" if len(absent) > 1 else "has"
        return (
            f"{_ranks([self._origin[rank] for rank in absent])} {have} not reached {where} within"
            f" {self._timeout.total_seconds():g} s: see what hangs there before it, or was stopped"
        )

    def pass_together(self, step: str) -> None:
        """Wait until all ranks have come to ``step``; raise what one of them has failed of."""
        if self._store.add(f"proof/{step}", 1) == self._size:
            self._store.set(f"proof/all {step}", _WELL)
        self._hear(step)

    def fail(self, how: str, why: str) -> NoReturn:
        """Have everybody fail with ``why``, or with what a rank has failed of before."""
        self._say(how, why)
        self._hear("proved")
        raise _error(how, why)  # whatever somebody has left in the store: this rank knows better

    def _say(self, how: str, why: str) -> None:
        """Have everybody hear ``why``, unless a rank has said something before."""
        if self._store.add("proof/failures", 1) == 1:
            for step in ("here", "connected", "proved"):
                self._store.set(f"proof/all {step}", self._signed(f"{how} {why}".encode()))

    def failed(self) -> bool:
        """Whether a rank has failed."""
        return int(self._store.add("proof/failures", 0)) > 0

    def _hear(self, step: str) -> None:
        self._wait(f"proof/all {step}")
        said = bytes(self._store.get(f"proof/all {step}"))
        if said == _WELL.encode():
            return
        proof, found = said[:PROOF], said[PROOF:]
        how, _, why = _shown(found).partition(" ")
        if not genuine(proof, self._signed(found)[:PROOF]) or how not in (_TAKEN, _LOST):
            raise ProtocolError(
                "somebody has left in the store where ranks meet what no rank of this job has"
                f" written: '{_shown(said)}'. Or not all ranks have the same {SECRET}"
            )
        raise _error(how, why)

    def _signed(self, text: bytes) -> bytes:
        """Return ``text`` behind a proof that whoever says it has this rank's key, or blanks."""
        proof = b"" if self._key is None else derive(self._key, "text", text)
        return proof.hex().ljust(PROOF).encode() + text

    def _wait(self, name: str) -> None:
        if missed := self._missed(name):
            raise missed

    def _missed(self, name: str) -> PeerLost | None:
        """Wait for what the store has as ``name``; return an error if it does not appear."""
        began = time.monotonic()
        try:
            self._store.wait([name], self._timeout)
        except RingError:
            raise
        except (RuntimeError, TimeoutError) as error:  # of a store that is gone, at once
            seconds = round(time.monotonic() - began)
            missed = PeerLost(
                f"rank {self._rank} of {self._size} waited {seconds} s for the others to connect"
                f" over gloo: {str(error).splitlines()[0]}"
            )
            missed.__cause__ = error
            return missed
        return None


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:LISTED]))}{more}"


def _error(how: str, why: str) -> RingError:
    return PeerLost(why) if how == _LOST else ProtocolError(why)


def _shown(said: bytes) -> str:
    """Return a text as a line for a terminal: anybody may have left it in torch's own store."""
    text = said[:LONGEST].decode(errors="replace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def prove(comm: Communicator, key: bytes, name: bytes) -> tuple[list[int], str]:
    """Challenge every rank of ``comm``, and answer. Collective.

    ``name`` is the group's. Returns who does not know ``key``, and what only this proof is called.
    """
    size, rank = comm.size, comm.rank
    mine, theirs = secrets.token_bytes(NONCE), np.zeros(size * NONCE, np.uint8)
    comm.allgather(np.frombuffer(mine, np.uint8), theirs)
    nonces = [theirs[r * NONCE : (r + 1) * NONCE].tobytes() for r in range(size)]
    own = derive(key, "gloo")

    def proof(source: int, to: int) -> bytes:
        facts = b"%d %d %d " % (size, source, to) + name + nonces[source] + nonces[to]
        return derive(own, "proof", facts)

    sent = np.frombuffer(b"".join(proof(rank, to) for to in range(size)), np.uint8)
    came: Array = np.zeros(sent.size, np.uint8)
    comm.alltoall(sent, came)
    length = sent.size // size
    strangers = [
        source
        for source in range(size)
        if source != rank
        and not genuine(
            came[source * length : (source + 1) * length].tobytes(), proof(source, rank)
        )
    ]
    return strangers, hashlib.sha256(name + theirs.tobytes()).hexdigest()


def diverted(
    comm: Communicator, key: bytes, name: str, connections: Connections, networks: int
) -> list[int]:
    """Return the ranks to which ``connections`` do not lead straight. Collective.

    There is one for each of the ``networks``. ``name`` was never used before. Who connects may look
    to the other end as if it came from elsewhere, where addresses are translated on the way; what
    it has reached has to be the other.
    """
    own = derive(key, "gloo")
    here, reached = connections.places()
    said = comm.allgather_bytes(seal(own, name, json.dumps([here, reached]).encode(), comm.rank))
    lacking = []
    for rank, sealed in enumerate(said):
        if rank == comm.rank:
            continue
        try:
            theirs, gone_to = json.loads(unseal(own, name, sealed, rank))
        except ProtocolError:
            lacking.append(rank)
            continue
        to, of = _plain(theirs), _plain(here)
        straight = sum(end in to for end in map(_bare, reached))
        straight += sum(end in of for end in map(_bare, gone_to))
        if straight < networks:
            lacking.append(rank)
    return lacking


def _plain(ends: Sequence[Sequence[Any]]) -> set[tuple[str, int]]:
    return set(map(_bare, ends))


def _bare(end: Sequence[Any]) -> tuple[str, int]:
    """Return an end without its interface, which each host calls as it likes."""
    return str(end[0]).partition("%")[0], int(end[1])


def admit(
    comm: Communicator,
    barrier: StoreBarrier,
    key: bytes | None,
    connections: Connections,
    networks: int = 1,
) -> None:
    """Let the ranks of a new group prove themselves, before anything else travels. Collective.

    ``connections`` are the group's, one to each rank over each of ``networks``. Without a ``key``
    on any rank nothing is proved.
    Raises, the same on every rank, ProtocolError when somebody has taken a rank's place, or stands
    between two, LaunchError when some ranks have a key and others do not, PeerLost when a rank goes
    meanwhile.
    """
    barrier.pass_together("connected")
    if (keys := barrier.keys()) not in (0, comm.size) or (keys == 0 and key is not None):
        raise LaunchError(
            f"{keys} of {comm.size} ranks have a key of the job: set {SECRET} to the same text for"
            " every rank, or for none"
        )
    if key is None:
        return
    ended, late = threading.Event(), threading.Event()

    def watch() -> None:
        limit = time.monotonic() + PATIENCE
        while not ended.wait(LOOK):
            if time.monotonic() > limit:
                late.set()
            try:
                over = barrier.failed() or late.is_set()
            except RuntimeError:  # whoever keeps the store has gone
                over = True
            if over:
                connections.interrupt()
                return

    watcher = threading.Thread(target=watch, name="ringlet proof", daemon=True)
    watcher.start()
    how = why = ""
    try:
        strangers, name = prove(comm, key, barrier.name)
        if strangers:
            how, why = _TAKEN, taken(comm, strangers)
        elif others := diverted(comm, key, name, connections, networks):
            how, why = _TAKEN, through_others(comm, others)
    except PeerLost as error:
        how, why = _LOST, unproved(comm, error, late.is_set())
    finally:
        ended.set()
        watcher.join()
    if how:
        barrier.fail(how, why)
    barrier.pass_together("proved")


def taken(comm: Communicator, ranks: list[int]) -> str:
    """Say whose place was taken, and where."""
    who = ", ".join(str(comm.origin[rank]) for rank in ranks)
    return (
        f"whoever has connected to rank {comm.origin[comm.rank]} (host {socket.gethostname()}) over"
        f" gloo as rank {who} does not know the job's key: somebody on the network has taken that"
        f" rank's place, or it has another {SECRET}. Nothing was told, nothing it sent was used"
    )


def through_others(comm: Communicator, ranks: list[int]) -> str:
    """Say between whom somebody stands."""
    return (
        f"no connection over gloo leads straight from rank {comm.origin[comm.rank]} (host"
        f" {socket.gethostname()}) to {_ranks([comm.origin[rank] for rank in ranks])}: somebody has"
        " changed an address where ranks meet, and stands between, or a proxy does. Nothing was"
        " told. Start the job with `ringlet run`, whose store lets nobody else in, or see who"
        " reaches MASTER_PORT"
    )


def unproved(comm: Communicator, error: RingError, late: bool) -> str:
    """Say that the proofs did not come through: in time, where it is ``late``."""
    who = (
        f"rank {comm.origin[comm.rank]} (host {socket.gethostname()}) could not make sure over gloo"
        " who the other ranks are"
    )
    if not late:
        return f"{who}: {error}"
    return (
        f"{who} within {PATIENCE:g} s: somebody on the network may have connected in the place of"
        " one, and says nothing, or a rank was stopped"
    )
