"""What a process that joins an elastic job loads before it asks for a rank: then the others wait.

The ranks that train leave the specs of their compressors with the launcher, so that a newcomer
knows which kernels to load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.core.compile_lock import compile_lock, kernels_of
from ringlet.ring.collectives import weighted_sums
from ringlet.ring.collector import paused

log = logging.getLogger("ringlet")

loads: list[Callable[[], None]] = []  # adapters add what their framework would load later


def warm_up(specs: Sequence[str]) -> None:
    """Load what a rank needs that trains with ``specs``. What fails will say so when it is used."""
    with paused():
        for load in loads:
            load()
        _load_kernels(specs)


def _load_kernels(specs: Sequence[str]) -> None:
    with compile_lock("sums"):
        weighted_sums.load()
    for spec in specs:
        try:
            with compile_lock(kernels_of(spec)):
                parse(spec).warm_up(Context(xp=np, workspace=Workspace(np)))
        except Exception:
            log.debug("no kernels were loaded for %r", spec, exc_info=True)
