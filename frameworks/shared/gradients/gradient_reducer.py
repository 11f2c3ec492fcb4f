"""Reducing all gradients of a step at once, as NumPy arrays: what tapes and optimizers share."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from ringlet.compressors.core.context import State
from ringlet.compressors.states import bare, carry_over, prescale
from ringlet.fusion import Request
from ringlet.job import json_exchange
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import Runtime, current, is_initialized
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.drift import Drift, sums_of_bits, warn_of_variables
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_list import GradientList
from ringlet.shared.gradients.gradient_settings import CommonValue, Settings, Slot
from ringlet.shared.gradients.local_steps import (
    as_they_are,
    finite,
    move_rows,
    overflowed,
    pay_back,
)
from ringlet.shared.gradients.pending_passes import Pending, other_number, warn_of_forgotten
from ringlet.shared.list_changes import ListChanges
from ringlet.shared.memory import Memory
from ringlet.shared.model_agreement import (
    EPOCH_ENDS,
    TRAINING_ENDS,
    UNUSED,
    agree,
    common_names,
    told_alike,
)
from ringlet.shared.residual_store import (
    fit_all,
    warn_of_common,
    warn_of_misfits,
    warn_of_strangers,
)
from ringlet.shared.residual_store import replace as replace_states
from ringlet.shared.variable_names import (
    alike,
    cohorts,
    warn_of_other_groups,
    warn_of_unmatched,
)

log = logging.getLogger("ringlet")

_BROADCAST = "broadcast them from one rank before training"
_SAME = "pass the same on all ranks, or replicas would drift apart"
_RESTARTS = "how often what compressors remember was put in place"
_EVERYWHERE = "load compressor state, or restore it, on all ranks or on none"


@dataclass(frozen=True)
class Snapshot:
    """What compressors remembered at a step, among so many ranks."""

    states: dict[str, State]
    step: int
    among: int


class GradientReducer:
    """Reduces lists of gradients, and keeps what compressors remember, by variable name.

    Outlives ``shutdown`` and ``init``: what is declared with an engine is declared again.
    ``warns`` of patterns that match none of its variables; off for one that has a part of them.
    ``told`` is what else ranks must have in common, by name. ``drift`` compares variables that are
    shown to it; ``cure`` is what to do where they differ.
    """

    def __init__(
        self,
        kind: str,
        settings: Settings,
        title: str = "",
        warns: bool = True,
        told: Mapping[str, object] | None = None,
        cure: str = _BROADCAST,
    ) -> None:
        self.settings, self._warns, self._told = settings, warns, told or {}
        self.memory = Memory(settings.router, settings.averages, settings.predivide)
        self.step = 0
        self.calls = 0  # of ``reduce``, steps that overflow or fail among them
        self._kind, self._label = kind, ""
        self._warns_of_groups = True
        self.title, self.drift = title or kind, Drift(partial(warn_of_variables, cure))
        self.rate: Callable[[], Any] | None = None  # the learning rate of the step at hand
        self.accumulators: Sequence[Accumulator] = ()  # of the passes that end in its steps
        self._runtime: Runtime | None = None
        self._number = 0  # of the process set, in which a set that is added again is another one
        self._bound = True  # whether what was declared with the runtime still counts
        self._joins = 0  # of the runtime, when ranks counted steps in common last
        self._agreed = False  # whether ranks have the same settings
        self._restarts = 0  # since ranks began to count in common
        self._loaded: set[str] = set()  # names of a checkpoint, before there are gradients
        self._changes: ListChanges
        self._lists: dict[tuple[Slot, ...], GradientList] = {}
        self._titles: dict[int, str] = {}  # by how many lists were declared before
        self._lock = self.memory.lock

    _common: CommonValue | None = None
    _counts = True  # the calls; False where somebody does for several reducers

    def cohorts(self, variables: Sequence[Any], groups: Any) -> list[str]:
        """Return the group that each variable travels in, as ``variable_names.cohorts``.

        The first rank warns, once, of groups that have none of them.
        """
        chosen = cohorts(variables, groups)
        if self._warns_of_groups and variables:
            self._warns_of_groups, process_set = False, self.settings.process_set
            if process_set.included() and process_set.rank() == 0:
                warn_of_other_groups(groups, chosen, variables, self.title)
        return chosen

    def enlist(self) -> None:
        """Count this reducer now, and not with its first gradients: ranks may begin with others."""
        with self._lock:
            if is_initialized() and self.settings.process_set.included():
                self._bind(current())

    def reduce(
        self,
        slots: Sequence[Slot],
        arrays: Sequence[Array],
        unused: Sequence[str] = (),
        outputs: Sequence[Array] | None = None,
        shown: Callable[[], Sequence[tuple[str, Array]]] | None = None,
        common: CommonValue | None = None,
    ) -> list[Array]:
        """Return the reduced gradients; collective, and called with the same slots on all ranks.

        ``unused`` are the names of variables that have no gradient on this rank. ``shown`` returns
        variables as they are before this step; it is called in the steps in which these are
        compared. ``common`` is something else that ranks must have in common in each step.

        ``arrays`` are one for each slot, or values and indices where it is sparse. So are the
        results, but those of sparse gradients that are fused are dense: one array. Arrays given
        are left alone, and never returned. Where no gradient is sparse the results may go to
        ``outputs``, contiguous arrays of the slots' dtypes and shapes.
        """
        with self._lock:
            self.calls += 1
            process_set, runtime = self.settings.process_set, current()
            if not process_set.included():
                return as_they_are(slots, arrays, self.settings, outputs)
            if process_set.size() == 1:
                if is_elastic():  # where there were more
                    self._bind(runtime)
                results = as_they_are(slots, arrays, self.settings, outputs)
                pay_back(slots, results, self.settings, self.memory)
                return results
            fresh = not self._is_bound(runtime)
            self._bind(runtime)
            try:
                return self._reduced_by_all(slots, arrays, unused, outputs, common, shown, runtime)
            except Mismatch:
                if fresh:  # ranks may have met here with different ones of several optimizers
                    self._unbind()
                raise

    def end_epoch(self, epoch: int) -> None:
        """Raise Mismatch, on all ranks, where some end ``epoch`` and others reduce gradients.

        Or where they end another one: ranks that resumed elsewhere would wait at the end of
        training. Collective: every rank calls it behind the last reduction of an epoch.
        """
        self._end(EPOCH_ENDS, str(epoch))

    def end_training(self) -> None:
        """Raise Mismatch, on all ranks, where some end training and others reduce gradients.

        Collective: every rank calls it behind the last epoch.
        """
        self._end(TRAINING_ENDS, "")

    def _end(self, what: str, which: str) -> None:
        with self._lock:
            process_set = self.settings.process_set
            if not process_set.included() or process_set.size() == 1:
                return
            self._bind(current())
            if not self._agreed:
                self._agree()
            while self.settings.guard and not self._all_finite([]):
                pass  # others skip a step for an overflow, and tell with the next one
            self._common = None
            self._changes.begin(what)
            try:
                self._compare([(what, which)])
            finally:
                self._changes.end()  # the list of the next step is no other one than the last

    def go_to(self, step: int) -> None:
        """Let the next reduction be that of ``step``, with the groups that there are.

        For states that the caller puts in place before each reduction; on all ranks alike.
        """
        with self._lock:
            self.step = step
            for each in self._lists.values():
                each.go_to(step)

    def restart(self, step: int) -> None:
        """Go on at ``step`` with the states as they are now: groups are declared anew."""
        with self._lock:
            self._forget()
            self.step, self._restarts = step, self._restarts + 1

    def load(
        self, states: Mapping[str, State], step: int, passes: Sequence[Pending] | None = None
    ) -> None:
        """Go on at ``step`` with ``states`` of a checkpoint, and with ``passes`` since that step.

        None leaves passes as they are. Warns of passes that do not fit, and with the first
        gradients of states that do not fit them, or of which there are none.
        """
        with self._lock:
            replace_states(self.memory.states, states, step)
            self._loaded = set(states)
            self.restart(step)
            lost = [] if passes is None else self._go_on(passes)
        warn_of_forgotten(lost)

    def _go_on(self, passes: Sequence[Pending]) -> list[str]:
        """Let accumulators go on with ``passes``; return in words what is forgotten."""
        pairs = list(zip_longest(self.accumulators, passes))
        own = [adds.go_on(given or Pending(adds.passes)) for adds, given in pairs if adds]
        others = [other_number(given, 1) for adds, given in pairs if not adds and given.count]
        return [*filter(None, own), *others]

    def remembered(self) -> Snapshot:
        """Return a copy of what compressors remember, for ``go_back``."""
        with self._lock:
            return Snapshot(copy.deepcopy(self.memory.states), self.step, self.memory.among)

    def inherit(self, before: GradientReducer) -> None:
        """Go on with what ``before`` remembers, which forgets it: an optimizer is wrapped again.

        And with its passes since the last step. The first rank warns of what is forgotten, under
        another spec, op, process set or number of passes.
        """
        settings, old = self.settings, before.settings
        forgotten_passes = self._go_on([each.pending() for each in before.accumulators])
        for each in before.accumulators:
            each.reset()
        if not settings.process_set.included() or not old.process_set.included():
            return
        with before._lock:
            given, step, among = (
                copy.deepcopy(before.memory.states),
                before.step,
                before.memory.among,
            )
            before.load({}, step)
        if old.process_set is not settings.process_set or old.op is not settings.op:
            lost = ["what is of another op or process set"] * (not all(map(bare, given.values())))
            given = {}
        else:
            lost = []
            how = old.process_set.size(), old.averages, old.predivide
            for name, state in given.items():
                then, now = old.router(name), settings.router(name)
                if forgotten := carry_over(state, then, now, *how):
                    lost.append(
                        f"{forgotten} of {name!r}, which {then} kept and {now} has no use for"
                    )
                prescale(state, now, old.predivide / settings.predivide)
        lost += dict.fromkeys(forgotten_passes)
        with self._lock:
            self.memory.among, self.step = among, step
            replace_states(self.memory.states, given, step)
        if lost and settings.process_set.rank() == 0:
            more = f"; and so on of {len(lost) - 1} more" if len(lost) > 1 else ""
            log.warning("%s is wrapped again, and forgets %s%s", self.title, lost[0], more)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce together."""
        return self.settings.process_set

    def go_back(self, to: Snapshot | None) -> None:
        """Go on with what was ``remembered``; with nothing where there was no reducer then."""
        with self._lock:
            found = Snapshot({}, 0, self.memory.among) if to is None else to
            replace_states(self.memory.states, copy.deepcopy(found.states), found.step)
            self.memory.among = found.among
            process_set = self.settings.process_set
            there = process_set.process_set_id is not None  # else the next step finds its size
            if there and is_elastic() and is_initialized() and self._runtime is current():
                size = process_set.size()
                if found.among != size:  # it is of before ranks came, or were lost
                    self.memory.resize(size)
            self.restart(found.step)

    def pass_over(self) -> None:
        """Take notice of steps that ranks have given up, as their lists of gradients differ."""
        for each in self._lists.values():
            each.pass_over()

    # -- inside ---------------------------------------------------------------------------------

    def _reduced_by_all(
        self,
        slots: Sequence[Slot],
        arrays: Sequence[Array],
        unused: Sequence[str],
        outputs: Sequence[Array] | None,
        common: CommonValue | None,
        shown: Callable[[], Sequence[tuple[str, Array]]] | None,
        runtime: Runtime,
    ) -> list[Array]:
        if not self._agreed:  # first: by settings ranks may take different ways from here on
            self._agree()
        if self.settings.guard and not self._all_finite(arrays):
            return overflowed(slots, arrays, self.settings)
        self._common = common
        key, done = (tuple(slots), common), None
        if self._counts:
            self._changes.begin(key)
        try:
            results = self._reduced(key[0], arrays, unused, outputs, runtime)
            done = key
        finally:
            if self._counts:
                self._changes.end(done)
        if shown is not None and self.drift.due and (variables := shown()):
            names, held = zip(*variables, strict=True)
            self.drift.compare(names, sums_of_bits(held))
        self.drift.ended()
        return results

    def _reduced(
        self,
        slots: tuple[Slot, ...],
        arrays: Sequence[Array],
        unused: Sequence[str],
        outputs: Sequence[Array] | None,
        runtime: Runtime,
    ) -> list[Array]:
        known, changes = self._lists.get(slots), self._changes
        compared = False  # in this call
        if known is None or not changes.enter(known.group):
            names, compared = self._compared(slots, unused), True
            known = known or self._declare(slots, names, runtime)
        # In every step: one of another list may have failed.
        move_rows(known.large, self.settings, self.memory)
        self.memory.began()
        try:
            results = known.run(arrays, outputs)
        except Exception:
            if changes.changed and known.group.told and not compared:
                self._compared(slots, unused)  # which says more, and on all ranks
            known.forget()
            known.group.acknowledge()  # of a later step that is given up this is not the one
            raise
        self.memory.ended()
        self.step = known.step
        return results

    def _compared(self, slots: Sequence[Slot], unused: Sequence[str]) -> list[str]:
        """Return names for ``slots``, which are those of all ranks. Raises Mismatch if not."""
        items = [(slot.name, slot.describe()) for slot in slots]
        items += [(name, UNUSED) for name in unused]
        return self._compare(items)[: len(slots)]

    def _compare(self, items: Sequence[tuple[str, str]]) -> list[str]:
        changed = self._changes.changed
        which = f"change{self._changes.call}" if changed else len(self._lists)
        where = f"{self._label}.{which}", items, self.settings.process_set
        common = self._common
        if changed and self._counts:
            self._agree_on_restarts(where[0])
        try:
            if common is not None:
                label, told = f"{where[0]}.common", [(common.name, common.value)]
                agree(self._kind, label, told, self.settings.process_set, common.cure)
            return common_names(f"gradients of {self._kind}", *where)
        except Mismatch:
            self.pass_over()
            raise

    def _agree_on_restarts(self, label: str) -> None:
        """Raise Mismatch, on all ranks, where some have put in place what others have not."""
        told = [(_RESTARTS, str(self._restarts))]
        try:
            agree(self._kind, f"{label}.restarts", told, self.settings.process_set, _EVERYWHERE)
        except Mismatch:
            self.pass_over()
            self._unbind()  # all ranks, which compare what they remember when they declare anew
            raise

    def _bind(self, runtime: Runtime) -> None:
        # Ranks outside of a process set do not count what its ranks do.
        number, same = self.settings.process_set.number(), self._runtime is runtime
        if not same or self._number != number:
            size = self.settings.process_set.size()
            if same or is_elastic():
                self.memory.resize(size)
            self.memory.among = size
            self._titles = self._titles if same else {}
        if not self._is_bound(runtime):
            self._runtime, self._bound, self._lists = runtime, True, {}
            self._number, self._agreed, self._restarts = number, False, 0
            self._label = runtime.unnamed(self._kind, number)
            self._changes = ListChanges(runtime, self._label, number)
            joined = False
        elif self._joins == runtime.joins:
            return
        else:  # ranks that joined late have taken, and counted, more steps
            joined = True
        self._joins = runtime.joins
        self.drift.restart(self._label, self.settings.process_set, joined)

    def _unbind(self) -> None:
        """Declare anew at the next step; what is remembered stays."""
        self._bound = False

    def _is_bound(self, runtime: Runtime) -> bool:
        same = self._number == self.settings.process_set.process_set_id
        return self._bound and same and self._runtime is runtime

    def _agree(self) -> None:
        """Raise Mismatch, on all ranks, unless all have the same settings. Collective."""
        told = {**self.settings.told(), **self._told}
        items = [(name, str(value)) for name, value in told.items()]
        where = f"{self._label}.settings", items, self.settings.process_set
        agree(f"settings of {self._kind}", *where, _SAME)
        self._agreed = True

    def _forget(self) -> None:
        if self._runtime is not None and self._counts:
            self._changes.renew()
        lists, self._lists = self._lists, {}
        for each in lists.values():
            each.release()

    def _declare(self, slots: tuple[Slot, ...], names: list[str], runtime: Runtime) -> GradientList:
        number = len(self._lists)
        label = f"{self._label}.{number}"
        self._adopt(names)
        if self._loaded:
            self._fit_loaded(slots, names)
        if self._warns and self.settings.process_set.rank() == 0:
            warn_of_unmatched(self.settings.router, names)
        self._warns = False
        agreed = [replace(slot, name=name) for slot, name in zip(slots, names, strict=True)]
        made = GradientList(label, agreed, self.settings, self.memory.states, runtime, self.step)
        self._settle(made, names, label)
        title = self._titles.get(number) or runtime.title(self._title(names))
        self._titles[number] = title
        made.show(runtime, title)
        self._lists[slots] = made
        return made

    def _settle(self, declared: GradientList, names: Sequence[str], label: str) -> None:
        """Let ranks that have loaded different states, or some of them none, begin alike.

        They count steps as the first rank does, for shared random numbers depend on it, and forget
        what ranks have in common unless all have it, of one step: replicas would part. Who forgets
        warns.
        """
        memory, states = self.memory, self.memory.states
        common = [name for name in memory.in_common() if name in names]
        steps = [int(states[name].get("step", 0)) for name in names]
        own = [common, declared.step, steps]
        process_set = self.settings.process_set
        if told_alike(own, f"{label}.alike", process_set):
            return
        expected = "what its compressors have in common with others, and steps"
        everyone = json_exchange.gather(own, f"{label}.states", process_set, expected, _is_state)
        memory.forget_in_common(common)  # of another step than others' it is another one
        warn_of_common(common)
        _, number, counted = everyone[0]
        for name, count in zip(names, counted, strict=True):
            states[name]["step"] = count
        declared.go_to(number)

    def _title(self, names: Sequence[str]) -> str:
        """Return what timelines and reports call this: the optimizer, and the model if known."""
        models = {name.partition("/")[0] for name in names if name.count("/") > 1}
        return f"{self.title} of {models.pop()}" if len(models) == 1 else self.title

    def _adopt(self, names: Sequence[str]) -> None:
        """See that there is a state for each name: new, or restored under a name that is alike."""
        states = self.memory.states
        restored = [] if self._lists else [name for name in states if name not in names]
        for name in names:
            left = [other for other in restored if other in states and alike(other, name)]
            if bare(states.get(name, {})) and len(left) == 1:
                states[name] = states.pop(left[0])
            self.memory.adopt(name)

    def _fit_loaded(self, slots: Sequence[Slot], names: Sequence[str]) -> None:
        """Forget what a checkpoint holds of variables of another size; warn of those that lack."""
        states, settings = self.memory.states, self.settings
        sizes = {n: math.prod(slot.shape) for n, slot in zip(names, slots, strict=True)}
        tensors = {name: (settings.router(name), size) for name, size in sizes.items()}
        how = settings.process_set.size(), settings.averages, settings.predivide
        warn_of_misfits(fit_all(states, {}, tensors, *how))
        warn_of_strangers([name for name in states if name in self._loaded - sizes.keys()])
        self._loaded = set()

    def _all_finite(self, arrays: Sequence[Array]) -> bool:
        """Whether no rank's arrays have an overflow. Collective."""
        flag = np.array([finite(arrays)], np.uint8)
        number = self.settings.process_set.number()
        request = Request(
            f"{self._label}.finite", "allreduce", "uint8", (1,), ReduceOp.MIN, process_set=number
        )
        assert self._runtime is not None
        self._runtime.engine.submit(request, flag, at_once=True).wait()
        return bool(flag[0])


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and isinstance(value[0], list)
        and all(isinstance(name, str) for name in value[0])
        and isinstance(value[1], int)
        and isinstance(value[2], list)
        and all(isinstance(step, int) for step in value[2])
    )


class LocalReducer(GradientReducer):
    """Stands for a reducer where gradients stay on their rank, and are only added up."""

    def reduce(
        self,
        slots: Sequence[Slot],
        arrays: Sequence[Array],
        unused: Sequence[str] = (),
        outputs: Sequence[Array] | None = None,
        shown: Callable[[], Sequence[tuple[str, Array]]] | None = None,
        common: CommonValue | None = None,
    ) -> list[Array]:
        """Return the gradients as they are."""
        return as_they_are(slots, arrays, self.settings, outputs)
