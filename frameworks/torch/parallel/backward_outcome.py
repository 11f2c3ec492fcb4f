"""What a backward pass under FSDP2 came to: its ranks agree on that when it ends.

FSDP2 cannot be used again after an exception in the middle of a backward pass, and the other ranks
would wait in the next module's collective. So failures are noted, and raised at the end.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ringlet.fusion import CompressionFailed
from ringlet.job.process_sets import InvalidArgument
from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import Mismatch, RingError
from ringlet.torch.ops.entry_points import untraced


class Stage(IntEnum):
    """Where something failed. Of several failures the earliest is told, of the lowest rank."""

    PLAN = 1
    ENCODE = 2
    DECODE = 3


class BackwardFailure(NamedTuple):
    """A failure as all ranks tell it."""

    stage: Stage
    kind: str
    text: str


@dataclass
class _Among:
    """Ranks that agree, first those with ``order`` 0, and what they are to have alike."""

    order: int
    step: int = 0
    steps: str = ""
    parts: str = ""  # what was reduced, a line each


_KINDS: dict[str, type[RingError]] = {
    kind.__name__: kind for kind in (CompressionFailed, InvalidArgument, Mismatch)
}


class BackwardOutcome:
    """Gathers what fails in a backward pass on this rank, and raises what any rank has noted."""

    def __init__(self, caller: str) -> None:
        self.passes = 0
        self._caller = caller
        self._task: int | None = None  # torch's number of the pass at hand
        self._failure: BackwardFailure | None = None
        self._cause: BaseException | None = None
        self._among: dict[Communicator, _Among] = {}

    def expect(self, shards: Communicator, replicas: Communicator | None = None) -> None:
        """Agree, when backward ends, with the ranks of ``shards``, then with their ``replicas``."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # after an exception the last one has not ended
            self.passes += 1
            self._task, self._failure, self._cause = task, None, None
            self._among.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._among.setdefault(shards, _Among(0))
        if replicas is not None:
            self._among.setdefault(replicas, _Among(1))

    def count(self, comm: Communicator, name: str, step: int, params: object) -> None:
        """Note at which step a reduction is, and of what. Ranks compare these."""
        among = self._among[comm]
        among.step, among.steps = step, f"{among.steps}{name} {step}\n"
        among.parts = f"{among.parts}{part(name, params)}"

    def note(self, failure: BackwardFailure, cause: BaseException | None = None) -> None:
        """Note what failed here, unless it comes of something earlier."""
        if self._failure is None or failure.stage < self._failure.stage:
            self._failure, self._cause = failure, cause
        if isinstance(cause, KeyboardInterrupt):
            self._cause = cause

    @untraced
    def _end(self) -> None:
        """Raise one error on all ranks if any of them has noted a failure."""
        among, failure, cause = self._among, self._failure, self._cause
        self._task, self._failure, self._cause, self._among = None, None, None, {}
        # What a small group knows, its ranks tell in larger ones.
        for comm in sorted(among, key=lambda comm: (among[comm].order, comm.size)):
            each = among[comm]
            failure = self.agreed(comm, failure, each.step, each.steps, each.parts)
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        if failure is not None:
            raise _KINDS[failure.kind](failure.text) from cause

    def agreed(
        self,
        comm: Communicator,
        failure: BackwardFailure | None,
        step: int,
        alike: str,
        parts: str = "",
    ) -> BackwardFailure | None:
        """Return what all ranks of ``comm`` tell of the ``failure`` that some of them come with.

        That is another one where ranks are not ``alike``, because ``step`` is not, or have reduced
        other ``parts`` of the model. Collective.
        """
        stage = 0 if failure is None else failure.stage
        own = np.array([stage, step, *(zlib.crc32(t.encode()) for t in (alike, parts))], np.int64)
        told = np.empty(4 * comm.size, np.int64)
        comm.allgather(own, told)
        stages, at, hashes, others = told.reshape(-1, 4).T
        apart = len(set(others.tolist())) > 1
        # What does not fit is decoded to anything, or not at all.
        if stages.any() and not (apart and stages[stages > 0].min() == Stage.DECODE):
            first = int(np.argmin(np.where(stages == 0, len(Stage) + 1, stages)))
            words = None if failure is None else f"{failure.kind}\n{failure.text}".encode()
            said = comm.broadcast_bytes(words if comm.rank == first else None, first).decode()
            kind, _, text = said.partition("\n")
            return BackwardFailure(Stage(int(stages[first])), kind, text)
        if apart:
            lists = [each.decode().splitlines() for each in comm.allgather_bytes(parts.encode())]
            lines = next(row for row in zip_longest(*lists, fillvalue="nothing") if len({*row}) > 1)
            shown = "; ".join(f"rank {r}: {t}" for r, t in zip(comm.origin, lines, strict=True))
            return BackwardFailure(
                Stage.PLAN,
                Mismatch.__name__,
                f"{self._caller}: ranks have gradients of different parameters ({shown}), so "
                "that their sum is of no use; use the same parameters on all ranks in a step, such "
                "as with 0.0 * p.sum() in the loss or, where torch has it, "
                "model.set_reduce_scatter_unused_params(True), and freeze the same",
            )
        if len(set(hashes.tolist())) > 1:
            ranks = zip(comm.origin, at.tolist(), strict=True)
            shown = "; ".join(f"rank {rank}: {n}" for rank, n in ranks)
            return BackwardFailure(
                Stage.PLAN,
                Mismatch.__name__,
                f"{self._caller}: ranks are at different steps ({shown}), so that their "
                "compressors do not fit each other; load on every rank what that rank saved, or on "
                "none",
            )
        return None


def compression_failed(error: CompressionFailed) -> BackwardFailure:
    """Return a failure of a parameter's compressor, as ``note`` takes it."""
    return BackwardFailure(Stage.ENCODE, CompressionFailed.__name__, str(error))


def part(name: str, params: object) -> str:
    """Return the line that tells of which ``params`` the reduction ``name`` is."""
    return f"{name!r} elements {params}\n"


def told(error: BaseException) -> str:
    """Return an ``error`` of this rank's as all ranks tell it."""
    return f"rank {dist.get_rank()}: {error}"
