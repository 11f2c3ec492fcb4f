"""Calls and results of ``ringlet.run`` in the store: who pickles them, key and names."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import ModuleType

from ringlet.ring.wire.framing import derive, seal
from ringlet.ring.wire.kv_store import KvStore
from ringlet.ring.wire.launch_link import store_key


def pickler() -> ModuleType:
    """Return cloudpickle if it is installed, else pickle."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle  # type: ignore[no-any-return]


def parcel_key(store: bytes) -> bytes:
    """Return the key that parcels are sealed with, made of the store's."""
    return derive(store, "parcels")


def leave_parcels(kv_store: KvStore, secret: bytes, parcels: Mapping[str, bytes] | None) -> bytes:
    """Leave ``parcels`` in the store of the job that has this ``secret``; return their key."""
    key = parcel_key(store_key(secret))
    for name, data in (parcels or {}).items():
        kv_store.put(name, seal(key, name, data))
    return key


def result_name(rank: int) -> str:
    """Where rank ``rank`` leaves what the function returned, pickled and sealed."""
    return f"result-{rank}"


def error_name(rank: int) -> str:
    """Where rank ``rank`` leaves the traceback of what the function raised, as text."""
    return f"error-{rank}"
