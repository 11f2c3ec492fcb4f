"""Whether ranks hold the same variables while they train: else their models drift apart."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ringlet.fusion import Request
from ringlet.fusion.requests.handle import Handle
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import RingError

log = logging.getLogger("ringlet")

RATE = "the learning rate"
_AGAIN = 16  # steps until ranks compare again; twice as many each time
_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32}
_CURE_OF_LATER = (
    "they were alike before, so look for what one rank does by itself, such as a callback, a "
    "schedule or noise that goes by its own metric or seed"
)
_CURE_OF_RATE = (
    "where a callback or a schedule goes by a metric, average that over all ranks first, and set "
    "the same rate on all ranks"
)


def is_compared(steps: int) -> bool:
    """Whether ranks compare what they hold after so many steps: after 1, and 16, 32, 64, ..."""
    return steps == 1 or (steps >= _AGAIN and steps.bit_count() == 1)


class Drift:
    """Compares variables between ranks after the first step, and warns on one rank.

    And again after 16, 32, 64, ... steps. Nobody waits for it: what was found is told in a later
    step. ``cure`` says what makes variables alike.
    """

    def __init__(self, cure: str) -> None:
        self._cure = cure
        self._under_way: list[tuple[int, list[str], Handle]] = []  # with the number of steps
        self._steps = 0
        self._warned = False
        self._label = ""

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._steps

    def restart(self, label: str, process_set: ProcessSet) -> None:
        """Count from here, among these ranks."""
        self._label, self._ranks = label, process_set
        self._under_way, self._steps = [], 0

    @property
    def due(self) -> bool:
        """Whether the step at hand, the variables of which are those before it, is one to look."""
        return is_compared(self._steps)

    def compare(self, variables: Sequence[tuple[str, Array]], steps: int | None = None) -> None:
        """Begin to compare these with other ranks', which list them in the same order.

        They are those after ``steps`` steps, by default all that have ended.
        """
        steps = self._steps if steps is None else steps
        own = np.array([_sum_of_bits(array) for _, array in variables], np.int64)
        both = np.concatenate([own, ~own])  # whose maximum is that of all, and of all the least
        name, number = f"{self._label}.alike{steps}", self._ranks.number()
        request = Request(name, "allreduce", "int64", both.shape, ReduceOp.MAX, process_set=number)
        try:
            handle = current().engine.submit(request, both)
        except RingError:
            log.debug("variables cannot be compared", exc_info=True)
            return
        self._under_way.append((steps, [name for name, _ in variables], handle))

    def ended(self) -> None:
        """Count a step, and tell what was found meanwhile."""
        self._steps += 1
        while self._under_way and self._under_way[0][2].done():
            step, names, handle = self._under_way.pop(0)
            try:
                most, least = np.split(handle.wait(), 2)
            except RingError:  # such as one that had no more to do than this step
                log.debug("variables could not be compared", exc_info=True)
                continue
            odd = [name for name, a, b in zip(names, most, ~least, strict=True) if a != b]
            if odd and not self._warned:
                self._warned = True
                if self._ranks.rank() == 0:
                    self._warn(RATE if RATE in odd else repr(odd[0]), step)

    def _warn(self, odd: str, step: int) -> None:
        cure = self._cure if step == 1 else _CURE_OF_LATER
        log.warning(
            "%s differs between ranks after %s, so that their models drift apart: %s",
            odd,
            "the first step" if step == 1 else f"{step} steps",
            _CURE_OF_RATE if odd == RATE else cure,
        )


def _sum_of_bits(array: Array) -> int:
    values = np.require(array, requirements=["C", "A"]).reshape(-1)
    kind = np.int64 if values.nbytes % 8 == 0 else _WORDS[values.itemsize]
    return int(values.view(kind).sum(dtype=np.int64))
