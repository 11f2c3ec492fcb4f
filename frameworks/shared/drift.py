"""Whether ranks hold the same variables while they train: else their models drift apart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ringlet.fusion.errors import EngineClosed
from ringlet.job.process_sets import ProcessSet
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import PeerLost
from ringlet.shared.rank_comparison import RankComparison

log = logging.getLogger("ringlet")

RATE = "the learning rate"
_AGAIN = 16  # steps until ranks compare again; twice as many each time
_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32}
# The next operation that needs the rank which has left, or the engine, says so. Any other error
# would be lost here: ranks that compare different variables differ too.
_LEFT = (PeerLost, EngineClosed)
_CURE_OF_LATER = (
    "they were alike before, so look for what one rank does by itself, such as a callback, a "
    "schedule or noise that goes by its own metric or seed"
)
CURE_OF_JOINS = (
    "a rank that has joined takes no steps, so behind last = join() broadcast the model and the "
    "optimizer's state on all ranks, with root_rank=last"
)
_CURE_OF_RATE = (
    "where a callback or a schedule goes by a metric, average that over all ranks first, and set "
    "the same rate on all ranks"
)


class Drift:
    """Compares variables between ranks after the first step, and warns once, on one rank.

    And again after 16, 32, 64, ... steps. Nobody waits for it, as ranks may wait for several
    optimizers, and in any order: what was found is told in a later step. ``warn`` takes the names
    of variables that differ, after how many steps they did, and whether that is the first step
    behind a join.
    """

    def __init__(self, warn: Callable[[Sequence[str], int, bool], None]) -> None:
        self._warn = warn
        self._under_way: list[tuple[int, Sequence[str], RankComparison]] = []  # with the steps
        self._steps = 0
        self._warned = False
        self._label = ""

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._steps

    def restart(self, label: str, process_set: ProcessSet, joined: bool = False) -> None:
        """Count from here, among these ranks: that have ``joined``, after unlike many steps."""
        self._joined = joined
        self._label, self._ranks = label, process_set
        self._under_way, self._steps = [], 0

    @property
    def due(self) -> bool:
        """Whether ranks compare what they hold after the steps that have ended: 1, 16, 32, ..."""
        return self._steps == 1 or (self._steps >= _AGAIN and self._steps.bit_count() == 1)

    def compare(self, names: Sequence[str], sums: Array, steps: int | None = None) -> None:
        """Begin to compare ``sums`` of variables' bits with other ranks', in the same order.

        The variables are those after ``steps`` steps, by default all that have ended. Collective.
        """
        steps = self._steps if steps is None else steps
        try:
            comparison = RankComparison(sums, f"{self._label}.alike{steps}", self._ranks)
        except _LEFT:  # such as one that had no more to do than this step
            log.debug("variables cannot be compared", exc_info=True)
            return
        self._under_way.append((steps, names, comparison))

    def ended(self) -> None:
        """Count a step, and tell what was found meanwhile.

        Raises what went wrong, but for ranks that have left: that fails no step they were in.
        """
        self._steps += 1
        while self._under_way and self._under_way[0][2].done():
            steps, names, comparison = self._under_way.pop(0)
            try:
                differing = comparison.differing().tolist()
            except _LEFT:
                log.debug("variables could not be compared", exc_info=True)
                continue
            odd = [name for name, differs in zip(names, differing, strict=True) if differs]
            if odd and not self._warned:
                self._warned = True
                if self._ranks.rank() == 0:
                    self._warn(odd, steps, self._joined and steps == 1)


def warn_of_variables(cure: str, odd: Sequence[str], steps: int, joined: bool) -> None:
    """Log that variables differ; ``cure`` says what makes them alike before training."""
    first = RATE if RATE in odd else repr(odd[0])
    when = "the first step" if steps == 1 else f"{steps} steps"
    log.warning(
        "%s differs between ranks after %s, so that their models drift apart: %s",
        first,
        f"{when} behind join()" if joined else when,
        _cure(cure, first, steps, joined),
    )


def _cure(before: str, first: str, steps: int, joined: bool) -> str:
    if joined:
        return CURE_OF_JOINS
    if first == RATE:
        return _CURE_OF_RATE
    return before if steps == 1 else _CURE_OF_LATER


def sums_of_bits(arrays: Iterable[Array]) -> Array:
    """Return a sum of the bits of each array, for ``Drift.compare``: one pass over it."""
    return np.array([_sum_of_bits(array) for array in arrays], np.int64)


def _sum_of_bits(array: Array) -> int:
    values = np.require(array, requirements=["C", "A"]).reshape(-1)
    kind = np.int64 if values.nbytes % 8 == 0 else _WORDS[values.itemsize]
    return int(values.view(kind).sum(dtype=np.int64))
