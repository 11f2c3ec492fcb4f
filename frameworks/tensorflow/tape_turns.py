"""Which of a loop's tapes has its turn: one rank that asks for other gradients says so to all."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count

from ringlet.job.session import Runtime, current
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch
from ringlet.shared.gradients.gradient_list import GradientList
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import CommonValue, Settings, Slot
from ringlet.shared.list_changes import ListTurns
from ringlet.shared.model_agreement import UNUSED, agree, common_names
from ringlet.tensorflow.ops.gradient_node import BROADCAST_VARIABLES

log = logging.getLogger("ringlet")

KIND, TITLE = "DistributedGradientTape", "GradientTape"
_KNOWN = "that their gradients were reduced before"
_SAME = "pass the same to the tapes of all ranks, or replicas would drift apart"
_ANEW = "make variables anew, and restore what compressors remember, on all ranks or on none"

_lists = count()


class TapeReducer(GradientReducer):
    """Reduces what tapes with one kind of settings give for one list of variables.

    Ranks with other variables, or other settings, have other reducers: so all reducers of a process
    set take turns, and ranks compare what they have where one of them is out of turn.
    """

    _counts = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(KIND, settings, TITLE, cure=BROADCAST_VARIABLES)
        # What has reduced gradients of the same variables under another spec.
        self.others: list[weakref.ref[GradientReducer]] = []
        self._turns: _Turns
        self._numbers: dict[tuple[Slot, ...], int] = {}  # of its lists, among those of all

    def reduce(
        self,
        slots: Sequence[Slot],
        arrays: Sequence[Array],
        unused: Sequence[str] = (),
        outputs: Sequence[Array] | None = None,
        shown: Callable[[], Sequence[tuple[str, Array]]] | None = None,
        common: CommonValue | None = None,
    ) -> list[Array]:
        """Return the reduced gradients, as ``GradientReducer`` does."""
        process_set, rest = self.settings.process_set, (unused, outputs, shown, common)
        if not process_set.included() or process_set.size() == 1:
            return super().reduce(slots, arrays, *rest)
        self._turns = turns = _turns(current(), process_set.number())
        turns.reducers.add(self)
        key, fresh = tuple(slots), not self._is_bound(current())
        if fresh:  # no list is declared, whether it was before or not
            self._numbers = {}
        number = self._numbers.get(key)
        number = self._numbers[key] = next(_lists) if number is None else number
        with turns.lock:
            turns.lists.begin(number)
            done = None
            try:
                if turns.lists.changed or turns.guarded:
                    self._take_turn(slots, unused)
                results = super().reduce(slots, arrays, *rest)
                # Ranks then wait for each other before they can hear who is out of turn.
                turns.guarded |= self.settings.guard
                done = number
            except Exception:
                if fresh:  # other ranks may have begun with another one
                    self._unbind()
                raise
            finally:
                turns.lists.end(done)
        return results

    # -- inside ---------------------------------------------------------------------------------

    def _bind(self, runtime: Runtime) -> None:
        super()._bind(runtime)
        # One rank that is left, or has begun alone, takes no turns before it binds.
        self._turns = _turns(runtime, self.settings.process_set.number())
        self._changes = self._turns.lists

    def _declare(self, slots: tuple[Slot, ...], names: list[str], runtime: Runtime) -> GradientList:
        others, self.others = self.others, []
        if others and self.settings.process_set.rank() == 0 and not self.memory.norm():
            self._warn_of_former([other for each in others if (other := each()) is not None])
        return super()._declare(slots, names, runtime)

    def _warn_of_former(self, others: Sequence[GradientReducer]) -> None:
        """Warn of what is held back under a spec that was that of several steps, and is no more.

        Tapes that take turns have had one step each.
        """
        for other in others:
            if other.step > 1 and (norm := other.memory.norm()):
                log.warning(
                    "the compression of DistributedGradientTape was %s for %d steps and is %s now: "
                    "a residual of norm %.3g waits until tapes have the former again. To go on "
                    "with it under the new one, hand it over on all ranks before the first step: "
                    "hvd.CompressorState(new_tape, variables).deserialize("
                    "hvd.CompressorState(old_tape, variables).serialize())",
                    other.settings.router, other.step, self.settings.router, norm,
                )  # fmt: skip
                return

    def _forget(self) -> None:
        super()._forget()
        self._numbers = {}  # a list that comes now is none that came before

    def _compared(self, slots: Sequence[Slot], unused: Sequence[str]) -> list[str]:
        if self._changes.changed:
            self._take_turn(slots, unused)
        return super()._compared(slots, unused)

    def _take_turn(self, slots: Sequence[Slot], unused: Sequence[str]) -> None:
        """Raise Mismatch, on all ranks, unless all have this reducer's turn. Once in a call."""
        turns, settings = self._turns, self.settings
        if turns.compared == turns.lists.call:
            return
        turns.compared = turns.lists.call
        items = [(slot.name, _described(slot)) for slot in slots]
        items += [(name, UNUSED) for name in unused]
        chosen = {
            "compression": settings.router,
            "op": settings.op.name.title(),
            "gradient_predivide_factor": settings.predivide,
            **settings.told(),
        }
        told = [(name, str(value)) for name, value in chosen.items()]
        try:
            common_names(f"gradients of {KIND}", turns.label, items, settings.process_set)
            where = f"{turns.label}.settings", told, settings.process_set
            agree(f"settings of {KIND}", *where, _SAME)
            self._agree_on_known(tuple(slots))
        except Mismatch:
            for reducer in turns.reducers:
                reducer.pass_over()
            raise

    def _agree_on_known(self, slots: tuple[Slot, ...]) -> None:
        known = self._is_bound(current()) and slots in self._lists
        where = f"{self._turns.label}.known", [(_KNOWN, str(known))], self.settings.process_set
        try:
            agree(f"variables of {KIND}", *where, _ANEW)
        except Mismatch:
            for reducer in self._turns.reducers:  # all alike, so that all ranks can go on
                reducer._unbind()
            raise


class _Turns:
    """The turns of the tapes of one process set."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self.label = runtime.unnamed("turns of tapes", number)
        self.lists = ListTurns(runtime, self.label, number)
        self.lock = threading.RLock()
        self.reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
        self.compared = 0  # the call in which ranks compared last
        self.guarded = False  # whether some of them see first whether all gradients are finite


def _described(slot: Slot) -> str:
    return f"{slot.describe()} in group {slot.cohort}" if slot.cohort else slot.describe()


def _turns(runtime: Runtime, number: int) -> _Turns:
    known: dict[int, _Turns] = runtime.extras.setdefault("turns of tapes", {})
    if number not in known:
        known[number] = _Turns(runtime, number)
    return known[number]
