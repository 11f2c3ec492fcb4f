"""A worker of Ray, Spark or Dask as a rank for a while: what is changed, and put back."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ringlet.ring.errors import LaunchError, PeerLost, RingError
from ringlet.ring.hosts.hosts import Seat
from ringlet.ring.hosts.interfaces import network
from ringlet.ring.placed.store_server import FAILED
from ringlet.ring.placed.ticket import Ticket
from ringlet.ring.process_owner import lent
from ringlet.ring.processes.torchrun import PLACE, meeting_place, torch_environment
from ringlet.ring.rendezvous.epochs import EPOCH
from ringlet.ring.rendezvous.place import place_variables
from ringlet.ring.wire.keys import MEMBER, STORE_KEY
from ringlet.ring.wire.kv_client import SCHEME, Client, forget
from ringlet.ring.wire.kv_store import Op

PATIENCE = 2.0  # seconds that a rank which has failed spends on saying so
_MEET = "placed/meeting place"
_one = threading.Lock()


@contextmanager
def embedded(ticket: Ticket) -> Iterator[None]:
    """Let ``connect`` in the block, in any thread, join the job as the rank that ``ticket`` says.

    Afterwards environment, logging and connections to the store are as before, and at no time is
    anything hooked that would end the process. ``sys.exit`` ends the block: with a code other than
    0 as a LaunchError. An exception is told to the other ranks, so that they do not wait. Raises
    LaunchError while this process is another rank, or when the store cannot be reached.
    """
    if not _one.acquire(blocking=False):
        raise LaunchError("this process is a rank already: an engine's worker can be one at a time")
    rank = ticket.standing.rank
    try:
        with _kept_environment(), _kept_logging(), lent():
            with contextlib.closing(Client(ticket.address, bytes.fromhex(ticket.key), rank)) as own:
                _enter(ticket, own)
            try:
                yield
            except SystemExit as error:
                if error.code not in (None, 0):
                    _say(ticket, f"it called sys.exit({error.code!r})")
                    text = f"rank {rank} called sys.exit({error.code!r})"
                    raise LaunchError(text) from error
            except BaseException as error:
                if not isinstance(error, PeerLost):
                    _say(ticket, f"{type(error).__name__}: {error}")
                raise
            finally:
                forget(ticket.address)
    finally:
        _one.release()


def _enter(ticket: Ticket, store: Client) -> None:
    """Put into the environment what ``ringlet run`` puts there."""
    standing = ticket.standing
    seat = Seat("", standing.local_rank, standing.local_size)
    for name in (MEMBER, EPOCH, "TORCHELASTIC_RUN_ID", "RINGLET_ADDRESS", "RINGLET_IFACE"):
        os.environ.pop(name, None)
    os.environ.update(torch_environment(standing.rank, standing.size, seat, {}))
    os.environ.update(ticket.env)
    os.environ.update(
        place_variables(
            RANK=standing.rank,
            SIZE=standing.size,
            LOCAL_RANK=standing.local_rank,
            LOCAL_SIZE=standing.local_size,
            CROSS_RANK=standing.cross_rank,
            CROSS_SIZE=standing.cross_size,
            HOSTNAME=platform.node(),
        )
    )
    os.environ.update(
        {
            "RINGLET_TRANSPORT": ticket.transport,
            "RINGLET_NODE": str(standing.node),
            "RINGLET_RENDEZVOUS": f"{SCHEME}{ticket.address}",
            STORE_KEY: ticket.key,
        }
    )
    os.environ.update(network(ticket.interfaces, store.own_address, os.environ))
    if all(name in ticket.env for name in PLACE):
        return
    if standing.rank == 0:
        place = meeting_place(os.environ["RINGLET_ADDRESS"])
        store.ask(Op.SET, _MEET.encode(), json.dumps(place).encode())
    os.environ.update(json.loads(store.ask(Op.GET, _MEET.encode())))


def _say(ticket: Ticket, why: str) -> None:
    """Tell the store that this rank has failed; nobody may be left to hear of it."""
    rank = ticket.standing.rank
    with contextlib.suppress(RingError, TimeoutError, OSError):
        client = Client(ticket.address, bytes.fromhex(ticket.key), rank, PATIENCE)
        with contextlib.closing(client):
            said = json.dumps([rank, why[:400]]).encode()
            client.ask(Op.SET, FAILED.encode(), said, timeout=PATIENCE)


@contextmanager
def _kept_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextmanager
def _kept_logging() -> Iterator[None]:
    log = logging.getLogger("ringlet")
    level, handlers = log.level, list(log.handlers)
    try:
        yield
    finally:
        log.setLevel(level)
        log.handlers[:] = handlers
