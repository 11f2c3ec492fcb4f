"""The authenticated framing of all that is not gradients: keys, proofs, frames, sealed bytes.

Control plane, heartbeats, launcher, store, links, objects and calls use it; nobody else makes MACs.

- A key is made for one purpose (``derive``), and is of no use for another.
- A frame is a length, a kind, a tag, and that many bytes. The tag is a keyed BLAKE2b over the
  number of the frame, its header and its bytes, by a key that only this connection, in this
  direction, has. So nobody in between can change, repeat, leave out, reorder or send back anything.
- Bytes that others keep or carry are sealed under a name, by a key of all ranks.

Lengths are checked before memory is taken, and nothing is ever unpickled here. What cannot be
believed raises ProtocolError.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Collection
from hashlib import blake2b

from ringlet.ring.errors import ProtocolError

TAG = 16  # bytes of a frame's
SEAL = 32  # bytes of what is put before sealed ones
_HEADER = struct.Struct("<IB")  # length, kind
_FACTS = struct.Struct("<QIB")  # number, and the header
_NUMBER = _FACTS.size - _HEADER.size
_SMALL = 1 << 14  # bytes that are faster copied than hashed in two pieces
OVERHEAD = _HEADER.size + TAG  # bytes of a frame besides its own
# Whether two are the same, found in a time that does not tell where they differ.
genuine = hmac.compare_digest
_SEALED = b"ringlet sealed"  # sets its MACs apart from those of frames, were keys the same


def derive(key: bytes, purpose: str, facts: bytes = b"") -> bytes:
    """Return the key for ``purpose``; it tells nothing of ``key`` or of the keys for others.

    As a proof, it shows that somebody knows ``key`` and means these ``facts``.
    """
    return hmac.digest(key, b"ringlet %s\0%s" % (purpose.encode(), facts), "sha256")


class Outgoing:
    """Makes the frames of one direction, to be sent in the order in which they are made."""

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=TAG)
        self._number = 0

    def frame(self, kind: int, body: bytes = b"") -> bytes:
        """Return ``body`` (less than 4 GiB) as a frame of ``kind`` (below 256)."""
        facts = _FACTS.pack(self._number, len(body), kind)
        self._number += 1
        return facts[_NUMBER:] + _tag(self._keyed, facts, body) + body


class Incoming:
    """Cuts the bytes of one direction into frames of ``kinds`` that have up to ``limit`` bytes."""

    def __init__(self, key: bytes, kinds: Collection[int], limit: int) -> None:
        self._keyed = blake2b(key=key, digest_size=TAG)
        self._kinds, self._limit = frozenset(kinds), limit
        self._number = 0
        self._pieces: list[bytes] = []  # of a frame that is not whole
        self._have, self._need = 0, OVERHEAD  # bytes of it

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames (kind, bytes) that ``data`` completes.

        Raises ProtocolError for a frame that is not allowed, or that the other end has not made.
        """
        self._have += len(data)
        if self._have < self._need or self._pieces:
            self._pieces.append(data)
            if self._have < self._need:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
        return self._cut(data)

    def _cut(self, buffer: bytes) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        start, size, self._need = 0, len(buffer), OVERHEAD
        while size - start >= OVERHEAD:
            length, kind = _HEADER.unpack_from(buffer, start)
            if length > self._limit or kind not in self._kinds:
                raise ProtocolError(f"a frame of kind {kind} and {length} bytes is not allowed")
            end = start + OVERHEAD + length
            if size < end:
                self._need = end - start
                break
            told = start + _HEADER.size
            body = buffer[told + TAG : end]
            facts = _FACTS.pack(self._number, length, kind)
            if not genuine(buffer[told : told + TAG], _tag(self._keyed, facts, body)):
                raise ProtocolError("a frame was changed, repeated or left out on its way")
            self._number += 1
            frames.append((kind, body))
            start = end
        if size > start:
            self._pieces.append(buffer[start:])
        self._have = size - start
        return frames


def _tag(keyed: blake2b, facts: bytes, body: bytes) -> bytes:
    state = keyed.copy()  # takes two thirds of the time that a new one does
    if len(body) <= _SMALL:
        state.update(facts + body)
    else:
        state.update(facts)
        state.update(body)
    return state.digest()


def seal(key: bytes, name: str, data: bytes, sender: int = 0) -> bytes:
    """Put before ``data`` what shows that ``sender``, who knows ``key``, made it as ``name``."""
    return _seal(key, name, data, sender) + data


def unseal(key: bytes, name: str, sealed: bytes, sender: int = 0) -> bytes:
    """Return what was sealed, which only then may be unpickled.

    Raises ProtocolError for bytes that were sealed under another name or key, or by another
    sender, or changed.
    """
    data = sealed[SEAL:]
    if not genuine(sealed[:SEAL], _seal(key, name, data, sender)):
        raise ProtocolError(f"{name!r}: what arrived was not made by this job")
    return data


def _seal(key: bytes, name: str, data: bytes, sender: int) -> bytes:
    state = blake2b(key=key, digest_size=SEAL, person=_SEALED)
    label = name.encode()
    state.update(_FACTS.pack(sender, len(label), 0) + label)
    state.update(data)
    return state.digest()
