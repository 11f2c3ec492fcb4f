"""A rank's place in its job, as variables: by Ringlet's names, and by Horovod's."""

from __future__ import annotations

_OWNERS = ("RINGLET", "HOROVOD")


def place_variables(**place: int | str) -> dict[str, str]:
    """Return ``place``, such as ``LOCAL_RANK=1``, as RINGLET_LOCAL_RANK and HOROVOD_LOCAL_RANK.

    Ringlet reads the first, programs written for Horovod the second.
    """
    return {f"{owner}_{name}": str(place[name]) for owner in _OWNERS for name in place}
