"""The step at hand: gradients arrive, and are handed in, and waited for; or it is given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ringlet.fusion import Group
from ringlet.ring.errors import RingError
from ringlet.torch.optimizer.backward_passes import BackwardPasses
from ringlet.torch.optimizer.declared_gradients import DeclaredGradients
from ringlet.torch.optimizer.double_reduction import refuse_ddp
from ringlet.torch.optimizer.optimizer_checks import warn_of_no_gradients
from ringlet.torch.optimizer.step_gradients import StepGradients
from ringlet.torch.optimizer.step_misuse import UNSYNCHRONIZED, changed_too_early, converted
from ringlet.torch.parameters.frozen import is_zero
from ringlet.torch.parameters.parameter_memory import ParameterMemory


class TrainingStep:
    """One step after the other of gradients that are ``declared``, and all ways in which one ends.

    A step begins with the first gradient that arrives: then it is ``renewed``. It is ``in_flight``
    from when anything is handed in until ``reduce`` has collected it all. Alone, a rank hands in
    nothing. A step that is reduced ends with ``reduce``; others by one of these:

    ===================  ===========================  =======================  ===================
    method               who calls it                 other ranks hear         memory becomes
    ===================  ===========================  =======================  ===================
    ``abandon``          the script, or what hands    of this step, or of the  mixed
                         in a gradient and raises     next if none has begun
    ``give_up_because``  who refuses to take a step,  of this step, or of the  mixed
                         such as ``refuse_changed``   next if all reduced it
    ``give_way``         OneBitAdam, to compare       of the step that begins  mixed
    ``leave``            ``Reducer.take_back``: a     of this step             as before the step
                         step has failed
    ``forget_passes``    ``zero_grad``, where no      nothing                  what it is
                         step is in flight
    ``end``              ``Reducer.join_epoch``       nothing                  resized for ranks
    ===================  ===========================  =======================  ===================

    They hear it as StepAbandoned. Mixed: of each tensor as before the step, or as after it.
    """

    def __init__(
        self,
        declared: DeclaredGradients,
        backward: BackwardPasses,
        gradients: StepGradients,
        memory: ParameterMemory,
    ) -> None:
        self.in_flight = False
        self.renewed = False
        self.awaits_backward = True  # False where no backward pass brings gradients
        self._declared, self._backward = declared, backward
        self._gradients, self._memory = gradients, memory
        self._known = frozenset(declared.parameters.values())
        self._unshared = False  # whether it is known that nobody else reduces these gradients

    # -- from gradients to results ----------------------------------------------------------------

    def arrive(self, name: str, p: torch.Tensor) -> None:
        """Take the gradient that backward has just accumulated in ``p``; hand it in once complete.

        Every tensor comes by here: mind what is called.
        """
        self.renewed = True
        declared = self._declared
        group = declared.group
        if group is None:
            self._backward.note(name, p.grad)
            return
        if not self._unshared:
            refuse_ddp(self._known)
            self._unshared = True
        if not self._backward.count(name, p):
            return
        if name in declared.agreement.frozen:
            declared.agreement.tell_news(group.turn)
        if name in declared.rows.dims:
            self._gather(name, group)
            return
        if not self.in_flight:
            self._begin(group)
        if due := group.note(name):
            self._submit(due, group, name)

    def refuse_changed(self) -> None:
        """Raise RuntimeError, and give the step up, if a gradient was changed since backward.

        On one rank alone it may be, unless what it should become is delivered elsewhere.
        """
        changed, cure = self._backward.changed(), self._gradients.cure
        group = self._declared.group
        if changed is None or (group is None and not cure):
            return
        why = changed_too_early(changed, cure)
        if group is None:
            self.end()
        else:
            self._give_up(group, why)
        raise RuntimeError(why)

    def warn_without_gradients(self) -> None:
        """Warn in the first step if no parameter has a gradient: the model may have others."""
        awaits, self.awaits_backward = self.awaits_backward, False
        if not awaits or self.renewed or self._declared.group is None:
            return
        parameters = self._declared.parameters.values()
        if all(p.grad is None or is_zero(p.grad) for p in parameters):
            warn_of_no_gradients(len(parameters))

    def reduce(self, group: Group) -> None:
        """Hand in what no hook has (as zeros if there is no gradient), and wait for all.

        Raises Mismatch where ranks have not done alike in this step.
        """
        self._acknowledge(group)
        self._hand_in_rest(group)
        self._collect(group)
        agreement = self._declared.agreement
        if agreement.end():  # some rank would go on with another model
            self._gradients.share_rows(f"{agreement.label}.sparse")
            agreement.compare(self._declared.steps, self._declared.align)
        agreement.settle()

    def _hand_in_rest(self, group: Group) -> None:
        """Hand in what no hook has; tell the others first what of it is frozen, if that is news."""
        agreement, rows = self._declared.agreement, self._declared.rows
        with self._abandoning():
            self._submit(group.due(), group)
            missing = group.missing()
        unused, parameters = (*missing, *rows.missing()), self._declared.parameters
        frozen = tuple(name for name in unused if not parameters[name].requires_grad)
        agreement.begin(frozen, group.turn)
        with self._abandoning():
            self._submit(missing, group)
            for name in rows.missing():
                self._gather(name, group)

    def _gather(self, name: str, group: Group) -> None:
        """Gather the rows of a sparse gradient, with what was held back while it was dense."""
        self._begin(group)
        self._declared.rows.gather(name, owed=self._memory.take_owed(name))
        self._backward.note(name, self._declared.parameters[name].grad)

    def _submit(self, names: Sequence[str], group: Group, arriving: str | None = None) -> None:
        """Hand in the gradients of ``names``, which are complete, or are not to come.

        In the hook of the one that is ``arriving``, if any is.
        """
        if not names:
            return
        tensors = self._gradients.take(names, arriving)
        if self._gradients.is_news(names):
            self._declared.agreement.tell_news(group.turn)
        self._begin(group)
        try:
            group.submit_all(tensors)
        except TypeError as error:
            dtypes = {name: member.request.dtype for name, member in group.members.items()}
            raise TypeError(converted(names, self._declared.parameters, dtypes, error)) from None

    def _begin(self, group: Group) -> None:
        """Note that something is handed in now."""
        if not self.in_flight and (self._memory.loaded_in_common or self._memory.recounted):
            self._declared.agreement.tell_news(group.turn)
        self._memory.began(fresh=not self.in_flight)
        self.in_flight = True

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Give the step up, on all ranks, where the block raises."""
        try:
            yield
        except Exception as error:
            self.abandon(f"{type(error).__name__}: {error}")
            raise

    def _collect(self, group: Group) -> None:
        """Wait for the results, and put them where they belong."""
        turn, rows = group.turn, self._declared.rows
        try:
            group.wait()
            if rows.dims:
                rows.collect()
            self._gradients.put(group.finite)
            self._memory.ended()
        except BaseException as error:
            # What is interrupted while it waits can be waited for again, and must be.
            if isinstance(error, Exception) or group.turn != turn:
                self.end()
            raise
        self.end()

    # -- a step that ends otherwise: see the table above ------------------------------------------

    def refuse_in_flight(self, what: str, cure: str = "") -> None:
        """Raise RuntimeError while gradients are being reduced: ``what`` has to wait.

        Others may take the step; ``cure`` says what to do first.
        """
        if self.in_flight:
            why = f": the gradients are being reduced. {cure}" if cure else ""
            raise RuntimeError(f"{what} between backward() and step(){why}")

    def refuse_unsynchronized(self, masters: bool) -> None:
        """Raise RuntimeError, and give the step up, if gradients were not waited for.

        They are each rank's own, or half reduced. On one rank alone they are whole, but ``masters``
        have not got them.
        """
        group = self._declared.group
        if not self.renewed or (group is None and not masters):
            return
        if group is not None:
            self._give_up(group, UNSYNCHRONIZED)
        raise RuntimeError(UNSYNCHRONIZED)

    def abandon(self, why: str) -> None:
        """Give up the step at hand on all ranks: see ``Group.abandon``."""
        group, rows = self._declared.group, self._declared.rows
        if group is None:
            return
        if not self.in_flight:
            if group.abandon(why):
                rows.gather_nothing()
            return
        for name in rows.missing():
            rows.gather(name)
        group.abandon(why)  # or the step was reduced already: then it can still be taken
        self.end()

    def give_up_because(self, error: RuntimeError) -> RuntimeError:
        """Give the step up on all ranks, if others take part; return ``error``, which says so."""
        group = self._declared.group
        if group is None:
            return error
        why = f"{error}. The step is given up, on all ranks"
        self._give_up(group, why)
        return RuntimeError(why)

    def give_way(self, why: str) -> None:
        """Give up, on all ranks, a step of which this rank has handed in nothing."""
        if (group := self._declared.group) is not None:
            group.acknowledge()
            group.abandon(why)
            self._declared.rows.gather_nothing()

    def leave(self, why: str) -> None:
        """End the step at hand, if there is one, whatever has come of it."""
        group = self._declared.group
        if group is not None and group.in_step:
            self.drop(why)
        self.end()

    def drop(self, why: str) -> bool:
        """Give up the step at hand; False if all ranks had reduced it. Its results are not used."""
        try:
            self.abandon(why)
        except RuntimeError:
            assert self._declared.group is not None
            with contextlib.suppress(RingError):
                self._declared.group.wait()
            self.end()
            return False
        return True

    def forget_passes(self) -> None:
        """Begin anew, unless gradients are being reduced: those that have come were cleared."""
        if not self.in_flight:
            self.end()
            if (group := self._declared.group) is not None:
                group.acknowledge()

    def end(self) -> None:
        """Let the next step begin here; nobody waits any longer for what this one was gathering."""
        self.in_flight = self.renewed = False
        self._backward.begin()
        self._gradients.clear()
        self._declared.rows.end()

    def _give_up(self, group: Group, why: str) -> None:
        """Give up the step at hand on all ranks, or the next one if this one was reduced."""
        self._acknowledge(group)
        if not self.drop(why):
            group.disown()  # what somebody wrote into the results is no damage
            with contextlib.suppress(RingError):
                self.give_way(why)

    def _acknowledge(self, group: Group) -> None:
        """Note that a step begins here, unless one is under way: the last one may have failed."""
        if not self.in_flight:
            group.acknowledge()
