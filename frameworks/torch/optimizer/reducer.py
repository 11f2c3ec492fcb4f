"""The reducer: it reduces the gradients of a model's parameters, in all steps and epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.fusion import Engine
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.compression import as_router
from ringlet.shared.gradients.accumulation import check_passes
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import agree
from ringlet.shared.requests import check_predivide
from ringlet.torch.ops.reductions import allreduce
from ringlet.torch.optimizer.backward_passes import BackwardPasses
from ringlet.torch.optimizer.declared_gradients import DeclaredGradients
from ringlet.torch.optimizer.drift_check import DriftCheck
from ringlet.torch.optimizer.grad_hooks import GradHooks
from ringlet.torch.optimizer.step_gradients import StepGradients
from ringlet.torch.optimizer.step_misuse import RETIRED
from ringlet.torch.optimizer.training_step import TrainingStep
from ringlet.torch.parameters.frozen import refuse_strays
from ringlet.torch.parameters.naming import warn_of_unmatched
from ringlet.torch.parameters.parameter_memory import ParameterMemory


class Reducer:
    """Reduces the gradients of ``named`` parameters in every step.

    Hooks on parameters let a gradient ``arrive`` in the step ``at_hand`` (``TrainingStep``), which
    hands it to the engine; ``synchronize`` waits for all results. These are kept apart:

    - ``memory``: what compressors remember, from step to step and in checkpoints
    - ``declared``: what all ranks declared to the engine, and at which step schedules are
    - ``at_hand``: what has come of this step, and all ways in which it ends
    - ``gradients``: what is handed in, as arrays, and where results go

    Parameters belong to the newest reducer that names them: an older one gives all of its hooks
    up, and its ``synchronize`` raises RuntimeError. A reducer that nobody holds is gone.
    ``groups`` are names of those that travel together. With ``unscaling``, a policy's, a step can
    be taken back. Memory, and steps, go on where those of the reducer ``before`` are. Where
    ``named`` are stand-ins, ranks compare ``compared`` while they train, the parameters of the
    model.
    """

    def __init__(
        self,
        named: dict[str, torch.nn.Parameter],
        options: Options,
        groups: Sequence[Sequence[str]] = (),
        unscaling: Unscaling | None = None,
        before: Reducer | None = None,
        title: str = "DistributedOptimizer",  # in timelines and reports
        compared: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        self._backward = BackwardPasses(named, options.backward_passes_per_step)
        op, predivide = options.op, options.gradient_predivide_factor
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum for gradients, not {op.name.title()}")
        check_predivide(predivide, op)
        self.parameters, self.process_set = named, options.process_set
        averages = op is ReduceOp.AVERAGE
        self.memory = ParameterMemory(named, options.router, averages, self.process_set, predivide)
        if unscaling is not None:
            self.memory.keep_steps()
        self.declared = DeclaredGradients(named, options, self.memory, groups, unscaling, title)
        self.gradients = StepGradients(self.declared, self._backward)
        self.at_hand = TrainingStep(self.declared, self._backward, self.gradients, self.memory)
        self._compared = named if compared is None else compared
        self._drift: DriftCheck  # of this epoch
        self._owing = False  # whether ranks that are no more have left residuals to this one
        self._elastic = is_elastic()
        self._engine: Engine | None = None  # in an elastic job: where gradients are declared
        if not self._elastic:
            self._begin_epoch()
        warn_of_unmatched(options.router, named)
        with contextlib.nullcontext() if before is None else before.memory.unchanged_on_error():
            if before is not None:
                self._inherit(before)
            if not self._elastic:
                self.declared.declare()
        if self._elastic:
            self._hooks = GradHooks(self, named, Reducer._arrive)
        else:
            self._hooks = GradHooks(self.at_hand, named, TrainingStep.arrive)

    @property
    def included(self) -> bool:
        """Whether this rank reduces with others."""
        return self.process_set.included() and self.process_set.size() > 1

    @property
    def step(self) -> int:
        """How many steps schedules of compressors have seen."""
        return self.declared.step

    # -- epochs of an elastic job -----------------------------------------------------------------

    def join_epoch(self) -> None:
        """In an elastic job: declare the gradients once to each epoch's engine, at the first use.

        Not before: newcomers make their optimizers while the others are elsewhere.
        """
        if self._joined:
            return
        engine = current().engine
        self.at_hand.end()
        self._begin_epoch()
        self.memory.resize(self.process_set.size())
        self._owing = self.declared.only_rank
        self.declared.declare()
        self._engine = engine  # not where that failed: it would be passed over the next time

    @property
    def _joined(self) -> bool:
        """Whether gradients were declared to the present engine."""
        return not self._elastic or self._engine is current().engine

    def _begin_epoch(self) -> None:
        self.declared.begin_epoch()
        self.gradients.begin_epoch()
        self._drift = DriftCheck(self._compared, self.declared.label, self.process_set)

    def _arrive(self, name: str, p: torch.Tensor) -> None:
        self.join_epoch()
        self.at_hand.arrive(name, p)

    # -- what changes between steps ---------------------------------------------------------------

    def set_compression(self, compression: Spec | Routes) -> None:
        """Compress differently from the next step on. Collective; RuntimeError during a step.

        Residuals carry over to compressors with error feedback, and all that is in units of the
        gradient where nothing but options changes. The first rank warns of what is forgotten.
        What raises changes nothing.
        """
        self.at_hand.refuse_in_flight("set_compression")
        with self.memory.unchanged_on_error():
            self.memory.change(as_router(compression))
            if self._joined:
                self.declared.declare()

    def declares(self, compression: Spec | Routes) -> bool:
        """Whether gradients were declared last as ``set_compression`` would declare them."""
        return self.declared.compressors == self.memory.compressors(as_router(compression))

    def set_passes(self, passes: int) -> None:
        """Reduce after ``passes`` backward passes from now on; RuntimeError during a step."""
        passes = check_passes(passes)
        self.at_hand.refuse_in_flight("set_backward_passes_per_step")
        self._backward.expect(passes)

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Go on with what this rank saved: see ``ParameterMemory.load``."""
        self._restored(self.memory.load(kept))

    def load_shards(self, shards: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what all ranks of an earlier job saved, which may be nothing."""
        self._restored(self.memory.load_shards(shards) if shards else self.memory.load(None))

    def _restored(self, step: int) -> None:
        for name, place in self.declared.places.items():
            current().engine.bring(self.memory.states[name], place)
        self.declared.restart(step)
        if self._joined:  # else join_epoch does, once the process set is there again
            self._owing = self.declared.only_rank

    def _inherit(self, before: Reducer) -> None:
        """Go on with what ``before`` remembers of the same parameters, and at its step."""
        memory, old = self.memory, before.memory
        memory.among, memory.owes = old.among, old.owes
        if old.keeps_steps:
            memory.keep_steps()
        if before.process_set is self.process_set and before.declared.op is self.declared.op:
            if before.at_hand.in_flight:  # a step that was refused because parameters were added
                before.at_hand.drop("the optimizer was wrapped again")
            scales = [each.declared.loss_scale for each in (self, before)]
            memory.inherit(old, scales[0] / scales[1])
        memory.note(old.loaded)
        self.declared.restart(before.step)

    # -- steps ------------------------------------------------------------------------------------

    def synchronize(
        self,
        param_groups: list[dict[str, Any]],
        settings: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Reduce what no hook handed in (as zeros if there is no gradient), and wait for all.

        Ranks compare the settings in ``param_groups``, or in the groups ``settings``.
        Raises RuntimeError if another reducer has the parameters now, or if ``param_groups`` holds
        one with a gradient that was never this reducer's: each rank would update it on its own.
        So where a gradient was changed since backward. Then the step is given up on all ranks, or
        the next one, where all have reduced this one already.
        """
        if self._hooks.retired:
            raise RuntimeError(RETIRED)
        self.join_epoch()
        at_hand, declared = self.at_hand, self.declared
        cure = "wrap the original optimizer again, on all ranks; residuals stay"
        try:
            refuse_strays(param_groups, self._hooks, "DistributedOptimizer", cure)
        except RuntimeError as error:
            raise at_hand.give_up_because(error) from None
        at_hand.warn_without_gradients()
        at_hand.refuse_changed()
        if declared.group is None:
            self._take_alone()
            return
        at_hand.reduce(declared.group)
        if declared.rows.choose(self.gradients.rows):
            declared.declare()
        groups = param_groups if settings is None else settings
        self._drift.look(groups, lambda: declared.steps)

    def _take_alone(self) -> None:
        """Take a step of which nothing travels, with what others have left to this rank."""
        self.at_hand.end()
        self.memory.began()
        if self._owing:
            self._owing = not self.memory.pay_back()
        self.memory.ended()

    def agreed(self, loss: Any) -> Any:
        """Return a closure's ``loss`` reduced like the gradients, so that all ranks see one value.

        Line searches decide by it how often they evaluate, which must not differ between ranks.
        """
        declared = self.declared
        if declared.group is None:
            return loss
        name, op, ranks = f"{declared.label}.loss", declared.op, self.process_set
        if isinstance(loss, torch.Tensor):
            return allreduce(loss.detach(), name=name, op=op, process_set=ranks)
        if isinstance(loss, SupportsFloat) and not getattr(loss, "ndim", 0):  # NumPy's, too
            wide = torch.tensor(float(loss), dtype=torch.float64)
            return allreduce(wide, name=name, op=op, process_set=ranks).item()
        return loss

    def compare(self, what: str, items: Sequence[tuple[str, str]], cure: str) -> None:
        """Raise Mismatch on all ranks, with the ``cure``, unless all have ``items``. Collective."""
        if (group := self.declared.group) is not None:
            label = f"{self.declared.label}.turn{group.turn}"
            agree(what, label, items, self.process_set, cure)

    def give_way(self, why: str) -> None:
        """Give up the step that begins now, so that all ranks come to ``compare``; ``why`` is told.

        The others hear of it from ``synchronize``, as StepAbandoned.
        """
        self.join_epoch()
        self.at_hand.give_way(why)

    def take_back(self) -> None:
        """Forget the step at hand, which has failed: compressors remember what was before it.

        One of an epoch that is over has ended with its engine.
        """
        if self._joined:
            self.at_hand.leave("the state goes back to what it was")
        else:
            self.at_hand.end()
        self.memory.take_back()

    def undo(self) -> None:
        """Forget what the last step, which is skipped, has changed in what compressors remember.

        It overflowed, which all ranks have seen; it counts as a step all the same.
        """
        self.memory.undo()
        self._owing = self.declared.only_rank
