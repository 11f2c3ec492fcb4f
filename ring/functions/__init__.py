"""Functions on every rank of a new job: ``ringlet.run``, over either launcher."""

from ringlet.ring.functions.call import run
from ringlet.ring.functions.parcels import WorkerFailed

__all__ = ["WorkerFailed", "run"]
