"""What ranks have to do alike in a step of a reducer: else their models part.

They freeze the same parameters, and go on alike with what they have loaded. A rank that does not do
what it did in the step before says so. Then all compare, once that step is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ringlet.job import json_exchange
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import Runtime
from ringlet.ring.errors import Mismatch
from ringlet.shared.list_changes import ListChanges
from ringlet.shared.model_agreement import agree, told_alike
from ringlet.torch.parameters.parameter_memory import ParameterMemory

_FREEZE = "set requires_grad alike on all ranks, in the same step, or their models drift apart"
_LOADED = (
    "compressors need the same on all ranks, or replicas part: load optimizer.state_dict() as each "
    "rank saved it in one step, or call hvd.broadcast_optimizer_state(optimizer, root_rank=0) on "
    "all ranks after loading. Factors and estimates are forgotten on all ranks, which go on from "
    "the last step that any has counted, and this step is not applied"
)


class _InCommon(NamedTuple):
    """What ranks have in common in a step: which parameters are ``frozen``, and what was loaded.

    ``loaded`` is ``ParameterMemory.loaded_in_common``, ``recounted`` that of the same name.
    """

    frozen: tuple[str, ...] = ()
    loaded: tuple[tuple[str, str], ...] = ()
    recounted: bool = False


class StepAgreement:
    """What ranks of ``process_set`` have in common in each step, by ``label`` and ``turn``.

    Of gradients that were declared for the ``declaration``-th time under that label, and whose
    compressors remember ``memory``.
    """

    def __init__(
        self,
        runtime: Runtime,
        label: str,
        declaration: int,
        memory: ParameterMemory,
        process_set: ProcessSet,
    ) -> None:
        self._label, self._memory, self._process_set = label, memory, process_set
        action, number = f"{label}.{declaration}", process_set.number()
        self._changes = ListChanges(runtime, action, number, _InCommon())
        self._now = _InCommon()  # of this rank, in the step that was begun last
        self.frozen: tuple[str, ...] = ()  # on all ranks, in the step that was settled last

    @property
    def label(self) -> str:
        """The name of the step that was begun last, the same on all ranks."""
        return f"{self._label}.step{self._changes.call}"

    def tell_news(self, turn: int) -> None:
        """Tell the others that ranks have to compare behind the step ``turn``.

        Before anything else is handed in: with that, others may end the step.
        """
        self._changes.tell(turn)

    def begin(self, frozen: tuple[str, ...], turn: int) -> None:
        """Note what this rank does in the step ``turn``; tell the others where it is news."""
        self._now = _InCommon(frozen, self._memory.loaded_in_common, self._memory.recounted)
        self._changes.begin(self._now, turn)

    def end(self) -> bool:
        """End a step that was reduced; return whether ranks have to compare now."""
        changed = self._changes.changed
        self._changes.end()
        return changed

    def compare(self, steps: Mapping[str, int], align: Callable[[Mapping[str, int]], None]) -> None:
        """Raise Mismatch on all ranks unless all freeze, have loaded, and count, the same.

        ``steps`` is how often each gradient was compressed, and under "" by which step schedules
        go. Where ranks have loaded or counted otherwise, ``align`` is called with the last step of
        any, and what they have in common is forgotten. Collective. ``agree_on_loaded`` does this
        where an optimizer's state is broadcast, ``DdpState.agree`` before a hook's first bucket.
        """
        frozen, loaded, _ = self._now
        label, ranks = self.label, self._process_set
        counted = self._memory.counts_in_common()
        if counted:
            counted.append(("in all", steps[""]))  # by which schedules go
        if told_alike((frozen, loaded, counted), f"{label}.alike", ranks):
            return
        agree("frozen parameters", f"{label}.frozen", [(n, "") for n in frozen], ranks, _FREEZE)
        counts = [(name, str(n)) for name, n in counted]
        try:
            agree("factors or estimates that were loaded", label, loaded, ranks, _LOADED)
            agree("steps that compressors have counted", f"{label}.steps", counts, ranks, _LOADED)
        except Mismatch:
            align(self._furthest(steps))
            self._memory.forget_in_common(self._memory.states)
            self.settle()
            raise

    def settle(self) -> None:
        """Go on: what ranks have in common is the same, and what they freeze is no news."""
        self._memory.agreed()
        self.frozen = self._now.frozen
        self._changes.end(_InCommon(self.frozen))

    def _furthest(self, steps: Mapping[str, int]) -> dict[str, int]:
        """Return how often each gradient was compressed on the rank where most often. Collective.

        So of ``steps`` on all ranks.
        """
        label, what = f"{self.label}.aligned", "how often gradients were compressed"
        furthest: dict[str, int] = {}
        for each in json_exchange.gather(dict(steps), label, self._process_set, what, _are_counts):
            furthest |= {name: max(n, furthest.get(name, 0)) for name, n in each.items()}
        return furthest


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(n, int) for n in value.values())
