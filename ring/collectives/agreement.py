"""A small collective in which ranks tell each other whether all of them can go on."""

from __future__ import annotations

from functools import partial

import numpy as np

from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import ExchangeFailed
from ringlet.ring.pipeline import Steps, Wire


def agree(comm: Communicator, failure: Exception | None, what: str) -> Steps:
    """Raise ExchangeFailed on every rank, with one text, if any of them comes with a ``failure``.

    Where that is, it is the cause. ``what`` says what the rank that is named could not do.
    """
    said = np.empty(comm.size, np.int8)
    own = np.array([failure is not None], np.int8)
    yield Wire(partial(comm.allgather, own, said))
    if said.any():
        witness = int(np.flatnonzero(said)[0])
        text = f"rank {comm.origin[witness]} {what}"
        raise ExchangeFailed(text, witness) from (failure if witness == comm.rank else None)
