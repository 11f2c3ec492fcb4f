"""Bytes that others keep or carry, with what shows that somebody with the key made them."""

from __future__ import annotations

import hmac

from ringlet.ring.errors import ProtocolError

SEAL = 32  # bytes of an HMAC-SHA256


def seal(key: bytes, name: str, data: bytes) -> bytes:
    """Put before ``data`` what shows that somebody with ``key`` made it as ``name``."""
    return hmac.digest(key, name.encode() + b"\0" + data, "sha256") + data


def unseal(key: bytes, name: str, sealed: bytes) -> bytes:
    """Return what was sealed, which only then may be unpickled.

    Raises ProtocolError for bytes that were sealed under another name or key, or changed.
    """
    data = sealed[SEAL:]
    if not hmac.compare_digest(seal(key, name, data)[:SEAL], sealed[:SEAL]):
        raise ProtocolError(f"{name!r}: what arrived was not made by this job")
    return data
