"""What ``ringlet.run`` and its ranks hand each other: pickles in the job's store, under its key."""

from __future__ import annotations

import hmac
import pickle
from types import ModuleType

from ringlet.ring.errors import ProtocolError

_SEAL = 32  # bytes of an HMAC-SHA256


def pickler() -> ModuleType:
    """Return cloudpickle if it is installed, else pickle."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle  # type: ignore[no-any-return]


def seal(key: bytes, name: str, data: bytes) -> bytes:
    """Put before ``data`` what shows that somebody with the job's ``key`` made it as ``name``."""
    return hmac.digest(key, name.encode() + b"\0" + data, "sha256") + data


def unseal(key: bytes, name: str, sealed: bytes) -> bytes:
    """Return what was sealed, which only then may be unpickled. Raises ProtocolError."""
    data = sealed[_SEAL:]
    if not hmac.compare_digest(seal(key, name, data)[:_SEAL], sealed[:_SEAL]):
        raise ProtocolError(f"{name} was not made by this job")
    return data


def result_name(rank: int) -> str:
    """Where rank ``rank`` leaves what the function returned, pickled and sealed."""
    return f"result-{rank}"


def error_name(rank: int) -> str:
    """Where rank ``rank`` leaves the traceback of what the function raised, as text."""
    return f"error-{rank}"
