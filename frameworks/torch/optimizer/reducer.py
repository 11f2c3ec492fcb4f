"""The reducer: takes gradients from hooks, hands them to the engine, and waits for the result."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import torch

from ringlet.compressors import Compressor
from ringlet.compressors.specs.edition import edition
from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.fusion import Engine, Group, Request
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import Runtime, current
from ringlet.precision.reduction import carrier
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import RingError
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.compression import as_router
from ringlet.shared.gradients.accumulation import check_passes
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import agree
from ringlet.shared.requests import check_predivide
from ringlet.torch.ops.reductions import allreduce
from ringlet.torch.optimizer.backward_passes import BackwardPasses
from ringlet.torch.optimizer.double_reduction import refuse_ddp
from ringlet.torch.optimizer.drift_check import DriftCheck
from ringlet.torch.optimizer.grad_hooks import GradHooks
from ringlet.torch.optimizer.optimizer_checks import warn_of_no_gradients
from ringlet.torch.optimizer.sparse_gradients import SparseGradients
from ringlet.torch.optimizer.step_agreement import StepAgreement
from ringlet.torch.optimizer.step_gradients import StepGradients
from ringlet.torch.optimizer.step_misuse import (
    RETIRED,
    UNSYNCHRONIZED,
    changed_too_early,
    converted,
)
from ringlet.torch.parameters.frozen import is_zero, refuse_strays
from ringlet.torch.parameters.naming import warn_of_unmatched
from ringlet.torch.parameters.parameter_memory import ParameterMemory
from ringlet.torch.tensors.placement import HOST, place_of
from ringlet.torch.tensors.views import check, dtype_of


class Reducer:
    """Reduces the gradients of ``named`` parameters in every step.

    Parameters belong to the newest reducer that names them: an older one gives all of its hooks
    up, and its ``synchronize`` raises RuntimeError. A reducer that nobody holds is gone.
    ``groups`` are names of those that travel together. With ``unscaling``, a policy's, a step can
    be taken back. ``memory`` is what compressors remember; it, and steps, go on where those of the
    reducer ``before`` are. Where ``named`` are stand-ins, ranks compare ``compared`` while they
    train, the parameters of the model.

    A step begins with its first gradient. It ends with ``synchronize``, or by one of these:

    ===================  ===========================  =======================  ===================
    method               who calls it                 other ranks hear         memory becomes
    ===================  ===========================  =======================  ===================
    ``abandon``          the script, or what hands    of this step, or of the  mixed
                         in a gradient and raises     next if none has begun
    ``give_up_because``  who refuses to take a step,  of this step, or of the  mixed
                         such as ``synchronize``      next if all reduced it
    ``give_way``         OneBitAdam, to ``compare``   of the step that begins  mixed
    ``leave_step``       TorchState, to go back       of this step             mixed
    ``take_back``        TorchState, DiLoCo: a step   of this step             as before the step
                         has failed
    ``undo``             masters: an overflow, which  nothing                  as before the step,
                         all ranks have seen                                   which is counted
    ``forget_passes``    ``zero_grad``, where no      nothing                  what it is
                         step is under way
    ``join_epoch``       what is first in an epoch    nothing                  resized for ranks
    ===================  ===========================  =======================  ===================

    They hear it as StepAbandoned. Mixed: of each tensor as before the step, or as after it.
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
        op = options.op
        predivide, process_set = options.gradient_predivide_factor, options.process_set
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum for gradients, not {op.name.title()}")
        check_predivide(predivide, op)
        self.parameters = named
        self._compared = named if compared is None else compared
        averages = op is ReduceOp.AVERAGE
        self.memory = ParameterMemory(named, options.router, averages, process_set, predivide)
        self.in_flight = False
        self.renewed = False  # whether backward has run since the last ``synchronize``
        self._op, self._predivide = op, predivide
        self._process_set = process_set
        self._cohorts = {name: str(i) for i, names in enumerate(groups) for name in names}
        self._sparse_as_dense = options.sparse_as_dense
        self._results: Mapping[str, torch.Tensor] = {}  # where to deliver
        self._cure = ""  # for gradients that were changed too early, also where one rank trains
        self._hooks = GradHooks(self, named)
        self._reduction, self._unscaling = options.policy.reduction, unscaling
        if unscaling is not None:
            self.memory.keep_steps()
        self._title = title
        self._group: Group | None = None
        self._agreement: StepAgreement  # of the group's steps
        self._declared: dict[str, Compressor] = {}  # with what, by parameter
        self._finalizer: Any = None
        self._alone = False  # whether it is known that nobody else reduces
        self._awaits = True  # a first gradient
        self._owing = False  # whether ranks that are no more have left residuals to this one
        self._elastic = is_elastic()
        self._engine: Engine | None = None  # in an elastic job: where gradients are declared
        self._begin_epoch("" if self._elastic else self._new_label())
        warn_of_unmatched(options.router, named)
        with contextlib.nullcontext() if before is None else before.memory.unchanged_on_error():
            self._start = 0 if before is None else self._inherit(before)  # steps before the group's
            if not self._elastic:
                self._declare(self._start)
        self._take_over()

    def _begin_epoch(self, label: str) -> None:
        """Begin with what belongs to one epoch's ranks; ``label`` is its name, "" for none yet."""
        self._label, self._shown = label, ""  # the latter is numbered, and as long as the label
        self._declarations = 0  # under this label
        # With nothing of an epoch before: one rank alone hands in none.
        self._gradients = StepGradients(self._op, self._backward)
        named, sparse_as_dense = self.parameters, self._sparse_as_dense
        self._rows = SparseGradients(named, label, self._op, self._process_set, sparse_as_dense)
        self._drift = DriftCheck(self._compared, label, self._process_set)
        self._included = self._process_set.included()

    def join_epoch(self) -> None:
        """In an elastic job: declare the gradients once to each epoch's engine, at the first use.

        Not before: newcomers make their optimizers while the others are elsewhere.
        """
        if not self._elastic or self._engine is current().engine:
            return
        self._end_step()
        self._start, engine = self.step, current().engine
        if self._group is not None:
            self._finalizer.detach()
        self._group = None
        self._begin_epoch(self._new_label())
        self.memory.resize(self._size())
        self._owing = self._included and self._size() == 1
        self._declare(self._start)
        self._engine = engine  # not where that failed: it would be passed over the next time

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce together."""
        return self._process_set

    @property
    def included(self) -> bool:
        """Whether this rank reduces with others."""
        return self._process_set.included() and self._size() > 1

    @property
    def step(self) -> int:
        """How many steps schedules of compressors have seen."""
        return self._start if self._group is None else self._group.step

    @property
    def steps(self) -> dict[str, int]:
        """How often each parameter's gradient was compressed, and under "" ``step``."""
        return self.memory.steps | {"": self.step}

    # -- what changes between steps -------------------------------------------------------------

    def refuse_mid_step(self, what: str) -> None:
        """Raise RuntimeError, which says ``what`` cannot be, while gradients are being reduced."""
        if self.in_flight:
            raise RuntimeError(f"{what} between backward() and step()")

    def set_compression(self, compression: Spec | Routes) -> None:
        """Compress differently from the next step on. Collective; RuntimeError during a step.

        Residuals carry over to compressors with error feedback, and all that is in units of the
        gradient where nothing but options changes. The first rank warns of what is forgotten.
        What raises changes nothing.
        """
        self.refuse_mid_step("set_compression")
        with self.memory.unchanged_on_error():
            self.memory.change(as_router(compression))
            if not self._elastic or self._engine is current().engine:
                self._declare(self.step)

    def declares(self, compression: Spec | Routes) -> bool:
        """Whether gradients were declared last as ``set_compression`` would declare them."""
        return self._declared == self.memory.compressors(as_router(compression))

    def set_passes(self, passes: int) -> None:
        """Reduce after ``passes`` backward passes from now on; RuntimeError during a step."""
        passes = check_passes(passes)
        self.refuse_mid_step("set_backward_passes_per_step")
        self._backward.expect(passes)

    def restart(self, step: int) -> None:
        """Let schedules go on at ``step``, which has to be the same on every rank."""
        self._start = step
        if self._group is not None:
            self._group.restart(step)

    def align(self, steps: Mapping[str, int]) -> None:
        """Count as another rank does: shared random numbers and schedules depend on it."""
        self.memory.align({name: n for name, n in steps.items() if name in self.parameters})
        self.restart(int(steps.get("", 0)))

    def expect_no_backward(self) -> None:
        """Note that no backward pass brings gradients: without any there is nothing to warn of."""
        self._awaits = False

    def load(self, kept: Mapping[str, Any] | None) -> None:
        """Go on with what this rank saved: see ``ParameterMemory.load``."""
        self._restored(self.memory.load(kept))

    def load_shards(self, shards: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what all ranks of an earlier job saved, which may be nothing."""
        self._restored(self.memory.load_shards(shards) if shards else self.memory.load(None))
        self._owing = self._included and self._size() == 1

    def _restored(self, step: int) -> None:
        for name, place in self._gradients.places.items():
            current().engine.bring(self.memory.states[name], place)
        self.restart(step)

    def deliver(self, results: Mapping[str, torch.Tensor], cure: str) -> None:
        """Let results go to ``results`` (float32, of the parameters' shapes), by name.

        Those of gradients that are elsewhere than in host memory, or travel as rows, stay there.
        ``cure`` says what to do instead of changing a gradient before it is reduced.
        """
        self._results, self._cure = results, cure
        self._place_results()

    def delivered(self, name: str) -> torch.Tensor | None:
        """Return where the last result was delivered to; None if it is in the gradient."""
        return self._gradients.result(name)

    def unscaled(self, name: str) -> bool:
        """Whether the last result is divided by the loss scale, and was looked at, already."""
        fused = name in self._gradients.last and self._gradients.places[name] == HOST
        return fused and self._unscaling is not None

    @property
    def finite(self) -> bool:
        """Whether all that is ``unscaled`` is finite."""
        return self._group is None or self._group.finite

    # -- a step, from gradients to results ------------------------------------------------------

    def _take_over(self) -> None:
        self._hooks.take_over()
        plain = Reducer._note if self._group is None else Reducer._ready
        self._hooks.register(Reducer._arrive if self._elastic else plain)

    def _arrive(self, name: str, p: torch.Tensor) -> None:
        self.join_epoch()
        arrived = self._note if self._group is None else self._ready
        arrived(name, p)

    def _note(self, name: str, p: torch.Tensor) -> None:
        self.renewed = True
        self._backward.note(name, p.grad)

    def _ready(self, name: str, p: torch.Tensor) -> None:
        self.renewed = True
        if not self._alone:
            refuse_ddp(self._hooks)
            self._alone = True
        if not self._backward.count(name, p):
            return
        group = self._group
        assert group is not None
        if name in self._agreement.frozen:
            self._agreement.tell_news(group.turn)
        if name in self._rows.dims:
            self._gather(name, p)
            return
        if not self.in_flight:
            self._begin()
        if due := group.note(name):
            self._submit(due, name)

    def _gather(self, name: str, p: torch.Tensor) -> None:
        """Gather the rows of a sparse gradient, with what was held back while it was dense."""
        self._begin()
        self._rows.gather(name, owed=self.memory.take_owed(name))
        self._backward.note(name, p.grad)

    def _submit(self, names: Sequence[str], arriving: str | None = None) -> None:
        """Hand in the gradients of ``names``, which are complete, or are not to come.

        In the hook of the one that is ``arriving``, if any is.
        """
        if not names:
            return
        assert self._group is not None
        tensors = self._gradients.take(names, self.parameters, arriving)
        if self._gradients.is_news(names):
            self._agreement.tell_news(self._group.turn)
        self._begin()
        try:
            self._group.submit_all(tensors)
        except TypeError as error:
            dtypes = {name: member.request.dtype for name, member in self._group.members.items()}
            why = converted(names, self.parameters, dtypes, error)
            raise TypeError(why) from None

    def _begin(self) -> None:
        if not self.in_flight and (self.memory.loaded_in_common or self.memory.recounted):
            assert self._group is not None
            self._agreement.tell_news(self._group.turn)
        self.memory.began(fresh=not self.in_flight)
        self.in_flight = True

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
        cure = "wrap the original optimizer again, on all ranks; residuals stay"
        try:
            refuse_strays(param_groups, self._hooks, "DistributedOptimizer", cure)
        except RuntimeError as error:
            raise self.give_up_because(error) from None
        changed = self._backward.changed()
        self._warn_without_gradients()
        if self._group is None:
            self._synchronize_alone(changed)
            return
        if changed is not None:
            why = changed_too_early(changed, self._cure)
            self._give_up(why)
            raise RuntimeError(why)
        self._acknowledge(self._group)
        self._hand_in_rest(self._group)
        self._collect(self._group)
        self._settle()
        if self._rows.choose(self._gradients.rows):
            self._declare(self.step)
        groups = param_groups if settings is None else settings
        self._drift.look(groups, lambda: self.steps)

    def _synchronize_alone(self, changed: str | None) -> None:
        """End a step of which nothing travels; RuntimeError where a gradient has ``changed``."""
        self._backward.begin()
        self.renewed = False
        if changed is not None and self._cure:
            raise RuntimeError(changed_too_early(changed, self._cure))
        self.memory.began()
        if self._owing:
            self._owing = not self.memory.pay_back()
        self.memory.ended()

    def _warn_without_gradients(self) -> None:
        """Warn in the first step if no parameter has a gradient: the model may have others."""
        if not self._awaits:
            return
        self._awaits = False
        there = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.renewed or self._group is None or any(not is_zero(grad) for grad in there):
            return
        warn_of_no_gradients(len(self.parameters))

    def _hand_in_rest(self, group: Group) -> None:
        """Hand in what no hook has."""
        with self._abandoning():
            self._submit(group.due())
            missing = group.missing()
        unused = (*missing, *self._rows.missing())
        frozen = tuple(name for name in unused if not self.parameters[name].requires_grad)
        self._agreement.begin(frozen, group.turn)
        with self._abandoning():
            self._submit(missing)
            for name in self._rows.missing() if self._rows.dims else []:
                self._gather(name, self.parameters[name])

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
        turn = group.turn
        try:
            group.wait()
            if self._rows.dims:
                self._rows.collect()
            self._gradients.put()
            self._gradients.make_sparse(self.parameters)
            self.memory.ended()
        except BaseException as error:
            # What is interrupted while it waits can be waited for again, and must be.
            if isinstance(error, Exception) or group.turn != turn:
                self._end_step()
            raise
        self._end_step()

    def _settle(self) -> None:
        """Go on from a step that was reduced; Mismatch where ranks have not done alike in it."""
        agreement = self._agreement
        if agreement.end():  # some rank would go on with another model
            label, ranks = f"{agreement.label}.sparse", self._process_set
            self._gradients.share_rows(self.parameters, label, ranks)
            agreement.compare(self.steps, self.align)
        agreement.settle()

    def agreed(self, loss: Any) -> Any:
        """Return a closure's ``loss`` reduced like the gradients, so that all ranks see one value.

        Line searches decide by it how often they evaluate, which must not differ between ranks.
        """
        if self._group is None:
            return loss
        name, process_set = f"{self._label}.loss", self._process_set
        if isinstance(loss, torch.Tensor):
            return allreduce(loss.detach(), name=name, op=self._op, process_set=process_set)
        if isinstance(loss, SupportsFloat) and not getattr(loss, "ndim", 0):  # NumPy's, too
            wide = torch.tensor(float(loss), dtype=torch.float64)
            return allreduce(wide, name=name, op=self._op, process_set=process_set).item()
        return loss

    def compare(self, what: str, items: Sequence[tuple[str, str]], cure: str) -> None:
        """Raise Mismatch on all ranks, with the ``cure``, unless all have ``items``. Collective."""
        if self._group is not None:
            agree(what, f"{self._label}.turn{self._group.turn}", items, self._process_set, cure)

    # -- a step that ends otherwise: see the table above ----------------------------------------

    def refuse_in_flight(self, cure: str) -> None:
        """Raise RuntimeError while gradients are being reduced: others may take the step."""
        if self.in_flight:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the gradients are being reduced. "
                f"{cure}"
            )

    def refuse_unsynchronized(self, masters: bool) -> None:
        """Raise RuntimeError, and give the step up, if gradients were not waited for.

        They are each rank's own, or half reduced. On one rank alone they are whole, but ``masters``
        have not got them.
        """
        if not self.renewed or (self._group is None and not masters):
            return
        if self._group is not None:
            self._give_up(UNSYNCHRONIZED)
        raise RuntimeError(UNSYNCHRONIZED)

    def abandon(self, why: str) -> None:
        """Give up the step at hand on all ranks: see ``Group.abandon``."""
        if self._group is None:
            return
        if not self.in_flight:
            if self._group.abandon(why):
                self._gather_nothing()
            return
        for name in self._rows.missing():
            self._rows.gather(name)
        self._group.abandon(why)  # or the step was reduced already: then it can still be taken
        self._end_step()

    def give_up_because(self, error: RuntimeError) -> RuntimeError:
        """Give the step up on all ranks, if others take part; return ``error``, which says so."""
        if self._group is None:
            return error
        why = f"{error}. The step is given up, on all ranks"
        self._give_up(why)
        return RuntimeError(why)

    def give_way(self, why: str) -> None:
        """Give up the step that begins now, so that all ranks come to ``compare``; ``why`` is told.

        The others hear of it from ``synchronize``, as StepAbandoned.
        """
        self.join_epoch()
        if self._group is not None:
            self._give_up_next(self._group, why)

    def leave_step(self) -> None:
        """End the step at hand, if there is one: another optimizer's failed meanwhile.

        One of an epoch that is over has ended with its engine.
        """
        over = self._elastic and self._engine is not current().engine
        if self._group is not None and self._group.in_step and not over:
            self._drop_step("the state goes back to what it was")
        self._end_step()

    def take_back(self) -> None:
        """Forget the step at hand, which has failed: compressors remember what was before it."""
        self.leave_step()
        self.memory.take_back()

    def undo(self) -> None:
        """Forget what the last step, which is skipped, has changed in what compressors remember."""
        self.memory.undo()
        self._owing = self._included and self._group is None

    def forget_passes(self) -> None:
        """Begin to count backward passes anew: what they left was discarded."""
        if not self.in_flight:
            self._backward.begin()
            self._gradients.clear()
            self.renewed = False
            if self._group is not None:
                self._group.acknowledge()

    def _give_up(self, why: str) -> None:
        """Give up the step at hand on all ranks, or the next one if this one was reduced."""
        assert self._group is not None
        self._acknowledge(self._group)
        if not self._drop_step(why):
            self._group.disown()  # what somebody wrote into the results is no damage
            with contextlib.suppress(RingError):
                self._give_up_next(self._group, why)

    def _acknowledge(self, group: Group) -> None:
        """Note that a step begins here, unless one is under way: the last one may have failed."""
        if not self.in_flight:
            group.acknowledge()

    def _drop_step(self, why: str) -> bool:
        """Give up the step at hand; False if all ranks had reduced it. Its results are not used."""
        assert self._group is not None
        try:
            self.abandon(why)
        except RuntimeError:
            with contextlib.suppress(RingError):
                self._group.wait()
            self._end_step()
            return False
        return True

    def _give_up_next(self, group: Group, why: str) -> None:
        """Give up, on all ranks, a step of which this rank has handed in nothing."""
        group.acknowledge()
        group.abandon(why)
        self._gather_nothing()

    def _gather_nothing(self) -> None:
        """Take part in gathering the rows of a step that was given up before it began here."""
        for name in self._rows.missing():
            self._rows.gather(name, nothing=True)
        for handle in self._rows.release():
            handle.forget()

    def _end_step(self) -> None:
        """Let the next step begin; nobody waits any longer for what this one was gathering."""
        self.in_flight = self.renewed = False
        self._backward.begin()
        self._gradients.clear()
        for handle in self._rows.release():
            handle.forget()

    # -- declaring gradients --------------------------------------------------------------------

    def _declare(self, step: int) -> None:
        """Declare the gradients, whose schedules go on at ``step``, with the present engine."""
        runtime, all_compressors = current(), self.memory.compressors()
        for name, p in self.parameters.items():
            check(p, f"parameter {name!r}")
        if self._size() == 1 or not self._included:
            self._declared = all_compressors
            return
        self._gradients.places = {n: place_of(p, self._op) for n, p in self.parameters.items()}
        self._place_results()
        names = [name for name in self.parameters if name not in self._rows.dims]
        carried = [self._carried(name) for name in names]
        # Declared even without parameters: a rank that has some has to hear of it.
        requests = [self._request(n, *each) for n, each in zip(names, carried, strict=True)]
        compressors = [compressor for compressor, _ in carried]
        states, number = [self.memory.states[name] for name in names], self._process_set.number()
        # Before others know that all have declared: one of them may tell of a change at once.
        self._declarations += 1
        which, ranks = (self._label, self._declarations), self._process_set
        agreement = StepAgreement(runtime, *which, self.memory, ranks)
        early = len(set(runtime.topology.hosts)) > 1  # on one host a bucket more hides no wire
        declared = self._label, requests, compressors, states
        group = runtime.engine.declare(*declared, step, number, early)
        self._declared, self._agreement = all_compressors, agreement
        self._go_on_with(group, runtime)

    def _request(self, name: str, compressor: Compressor, collective: str) -> Request:
        """Return what is declared of a parameter's gradient."""
        p = self.parameters[name]
        return Request(
            name,
            "allreduce",
            dtype_of(p),
            tuple(p.shape),
            self._op,
            str(compressor),
            collective,
            prescale=1.0 / self._predivide,
            postscale=self._predivide,
            process_set=self._process_set.number(),
            group=self._cohorts.get(name, ""),
            place=self._gradients.places[name],
            edition=edition(compressor),
        )

    def _carried(self, name: str) -> tuple[Compressor, str]:
        p, number = self.parameters[name], self._process_set.number()
        dtype = dtype_of(p)
        exact = current().engine.sums_in_float32(dtype, number)
        compressor = self.memory.compressor_of(name)
        return carrier(compressor, dtype, p.numel(), self._reduction, exact)

    def _go_on_with(self, group: Group, runtime: Runtime) -> None:
        """Reduce by ``group`` from now on, and let the engine forget the one before."""
        self._shown = self._shown or runtime.title(self._title)
        runtime.engine.entitle(group, self._shown)
        group.finite = self.finite  # of the last step, which a precision policy may ask of yet
        if self._group is not None:
            self._finalizer.detach()
            runtime.engine.release(self._group)
        group.unscale(self._unscaling)
        self._group = group if self.parameters else None
        self._finalizer = weakref.finalize(self, runtime.engine.release, group)

    def _place_results(self) -> None:
        places = self._gradients.places
        there = {n: r for n, r in self._results.items() if places.get(n) == HOST}
        self._gradients.results = there

    def _inherit(self, before: Reducer) -> int:
        """Go on with what ``before`` remembers of the same parameters; return the step."""
        memory, old = self.memory, before.memory
        memory.among, memory.owes = old.among, old.owes
        if old.keeps_steps:
            memory.keep_steps()
        if before._process_set is self._process_set and before._op is self._op:
            if before.in_flight:  # such as a step that was refused because parameters were added
                before._drop_step("the optimizer was wrapped again")
            scales = [1.0 if r._unscaling is None else r._unscaling.scale for r in (self, before)]
            memory.inherit(old, scales[0] / scales[1])
        memory.note(old.loaded)
        return before.step

    def _new_label(self) -> str:
        return current().unnamed("DistributedOptimizer", self._process_set.process_set_id or 0)

    def _size(self) -> int:
        return self._process_set.size()
