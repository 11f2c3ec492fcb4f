"""What a rank leaves in the store before it ends: whom it has lost, and with which code it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ringlet.ring.errors import LaunchError, PeerLost
from ringlet.ring.wire.keys import MEMBER, STORE_KEY
from ringlet.ring.wire.kv_client import SCHEME, Client
from ringlet.ring.wire.kv_store import Op

PATIENCE = 2.0  # seconds that a rank on its way out spends on each of these
_LONGEST = 400  # characters of the reason


@dataclass(frozen=True)
class LossReport:
    """The ranks that were lost, as far as the one that lost them knows, and its error's text."""

    ranks: tuple[int, ...] = ()
    text: str = ""

    def pack(self) -> bytes:
        """Return this as a value for the store."""
        cause = self.text.partition("\n\n")[0]  # what follows says where it was, not what
        return json.dumps([self.ranks, cause[:_LONGEST]]).encode()

    @classmethod
    def unpack(cls, value: bytes) -> LossReport:
        """Return what was packed; one that says nothing if ``value`` makes no sense."""
        try:
            ranks, text = json.loads(value)
            return cls(tuple(map(int, ranks)), " ".join(str(text).split()))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return cls()


def loss_report_name(rank: int) -> str:
    """Return the name in the store under which rank ``rank`` leaves its report."""
    return f"lost-{rank}"


def leaving_name(number: int) -> str:
    """Return the name under which a rank says that it is about to end, and with which code.

    In an elastic job ``number`` is the member's.
    """
    return f"leaving/{number}"


def leaving_code(told: bytes | None) -> int | None:
    """Return the code that ``tell_leaving`` has told; None where it, or what it is, is unknown."""
    told = told or b""
    return int(told) if told.isdigit() and len(told) < 4 else None


def report_loss(error: PeerLost, env: Mapping[str, str]) -> bool:
    """Tell the launcher that ``env`` names, if any, whom this rank has lost.

    Returns whether it was told: nobody is left to hear of it when the launcher is gone as well.
    """
    name = loss_report_name(int(env.get("RINGLET_RANK", -1)))
    return _tell(name, LossReport(error.ranks, str(error)).pack(), env)


def tell_leaving(code: int | None, env: Mapping[str, str]) -> None:
    """Tell the launcher that this rank ends with ``code``, None if unknown: the others lose it.

    An interpreter with torch in it takes a second to end, and longer where others keep the cores.
    In an elastic job only who fails says so.
    """
    if MEMBER not in env or (code or 0) & 255:
        number = int(env.get(MEMBER, env.get("RINGLET_RANK", -1)))
        _tell(leaving_name(number), b"?" if code is None else b"%d" % (code & 255), env)


def _tell(name: str, value: bytes, env: Mapping[str, str]) -> bool:
    place = env.get("RINGLET_RENDEZVOUS", "")
    if not place.startswith(SCHEME) or STORE_KEY not in env:
        return False
    rank, key = int(env["RINGLET_RANK"]), bytes.fromhex(env[STORE_KEY])
    for _ in range(2):  # this process may have stood still until time was up
        began = time.monotonic()
        try:
            # A connection of its own: another thread may be waiting for an answer on the usual one.
            client = Client(place.removeprefix(SCHEME), key, rank, PATIENCE)
            try:
                client.ask(Op.SET, name.encode(), value, timeout=PATIENCE)
            finally:
                client.close()
            return True
        except (LaunchError, TimeoutError):
            if time.monotonic() - began < PATIENCE:
                return False  # the launcher is gone
    return False
