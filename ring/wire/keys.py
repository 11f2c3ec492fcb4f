"""The key that all ranks of a job share, and what ranks agree on of it.

The launcher delivers it, or the user does. It never travels itself, nor does any key made of it
(``ringlet.ring.wire.framing.derive``).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringlet.ring.errors import LaunchError
from ringlet.ring.wire.framing import derive

if TYPE_CHECKING:  # it needs NumPy, and the launcher's helpers, which new ranks wait for, do not
    from ringlet.ring.communicator import Communicator

# The launcher gives it to each rank's program: the key to the job's store.
STORE_KEY = "RINGLET_STORE_KEY"
# The launcher of an elastic job numbers its processes by it: their ranks change.
MEMBER = "RINGLET_MEMBER"
# The user may give one where another launcher starts the ranks.
SECRET = "RINGLET_SECRET"
SHORTEST = 16  # characters of RINGLET_SECRET

_PRINT = 16  # bytes that tell whether two keys are the same


def job_key(env: Mapping[str, str]) -> bytes | None:
    """Return the key of the job that ``env`` belongs to, None where nobody has given one.

    It is the launcher's RINGLET_STORE_KEY, else RINGLET_SECRET: any text of at least 16 characters,
    the same for every rank. Raises LaunchError for one that is shorter, or malformed.
    """
    if given := env.get(STORE_KEY):
        try:
            return bytes.fromhex(given)
        except ValueError:
            raise LaunchError(f"{STORE_KEY} is not what the launcher has set it to") from None
    text = env.get(SECRET)
    if text is None:
        return None
    if len(text) < SHORTEST:
        raise LaunchError(
            f"{SECRET} has {len(text)} characters, but guessing must be hopeless: take at least"
            f" {SHORTEST}, such as what `openssl rand -hex 32` prints, the same for every rank"
        )
    return hashlib.sha256(b"ringlet secret " + text.encode("utf-8", "surrogateescape")).digest()


def agreed_key(comm: Communicator, purpose: str, env: Mapping[str, str]) -> bytes:
    """Return the key for ``purpose`` that the ranks of ``comm`` share. Collective.

    It is made of the job's key in ``env``. Where no rank has one, it is rank 0's choice, which
    travels over ``comm``. Raises LaunchError, the same on every rank, when their keys differ.
    """
    given = job_key(env)
    own = b"" if given is None else derive(given, purpose)
    mark = own and derive(own, "fingerprint")[:_PRINT]
    marks = comm.allgather_bytes(mark)
    if not any(marks):
        return comm.broadcast_bytes(secrets.token_bytes(32))
    known = next(theirs for theirs in marks if theirs)
    if others := [rank for rank, theirs in enumerate(marks) if theirs != known]:
        raise LaunchError(different(comm.size, others, all(marks)))
    return own


def fresh_key(comm: Communicator, key: bytes) -> bytes:
    """Return a key made of ``key`` that the ranks of ``comm`` have not had before. Collective.

    Every rank adds to it, so none of them takes for this job's what was sealed for an earlier one,
    though that had the same key and somebody repeats all that was said then.
    """
    own = secrets.token_bytes(32)
    said = comm.allgather_bytes(own)
    said[comm.rank] = own
    return derive(key, "fresh", b"".join(said))


def different(size: int, ranks: list[int], given: bool) -> str:
    """Say that ``ranks``, of ``size``, have no key, or (``given``) another one than the rest."""
    several = len(ranks) > 1
    who = f"rank{'s' if several else ''} {', '.join(map(str, ranks))} of {size}"
    lacks = f"{'have' if several else 'has'} no key, though other ranks have one"
    differs = f"{'do' if several else 'does'} not have the same key as the other ranks"
    remedy = f"set {SECRET} to the same text for every rank, or for none"
    return f"{who} {differs if given else lacks}: {remedy}"
