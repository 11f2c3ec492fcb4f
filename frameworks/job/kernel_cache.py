"""Where compiled kernels are kept: whoever may write there should be this user alone."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from ringlet.ring.errors import LaunchError
from ringlet.ring.safe_files import on_the_way, planted_in

_PACKAGES = ("ringlet", "ringlet.compressors", "ringlet.fusion", "ringlet.ring")


def refuse_strangers_kernels(env: Mapping[str, str]) -> None:
    """Raise LaunchError where kernels would be kept that another user may have put there.

    A folder that is absent is made, for this user alone: otherwise a stranger could do so later.
    """
    for name in ("NUMBA_CACHE_DIR", "RINGLET_KERNEL_CACHE"):
        if env.get(name):
            _refuse_strangers(name, env[name])


def _refuse_strangers(name: str, place: str) -> None:
    found = on_the_way(place)
    if not found:
        with suppress(OSError):  # where it cannot be made, Numba takes another one
            os.makedirs(place, mode=0o700, exist_ok=True)
        found = on_the_way(place)
    if not found and os.path.isdir(place) and (strangers := planted_in(place)):
        ours = _folders()
        found = next((each for each in strangers if os.path.basename(each) in ours), "")
    if found:
        raise LaunchError(
            f"{name}={place}: {found} belongs to another user, who could have this "
            "process run what he likes: kernels are loaded from there. Name a folder of your own"
        )


def _folders() -> set[str]:
    """Return what Numba calls its folders for the sources that there are, or that are loaded."""
    sources = {os.path.dirname(getattr(m, "__file__", None) or "") for m in [*sys.modules.values()]}
    for package in _PACKAGES:
        for root in getattr(sys.modules.get(package), "__path__", ()):
            sources.update(folder for folder, _, _ in os.walk(root, followlinks=True))
    return {_numbas(os.path.abspath(source)) for source in sources if source}


def _numbas(source: str) -> str:
    digest = hashlib.sha1(source.encode(errors="surrogateescape"), usedforsecurity=False)
    return f"{os.path.basename(source)}_{digest.hexdigest()}"
