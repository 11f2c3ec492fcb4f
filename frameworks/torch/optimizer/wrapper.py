"""DistributedOptimizer: reduces gradients as backward produces them, then steps."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.job.observation import step_skipped
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.precision import Policy
from ringlet.ring.callers import outside
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import agree_on_settings
from ringlet.shared.residual_store import remembered
from ringlet.shared.wrapping import Original, last_made, note_made, refuse_wrapped, wrapped
from ringlet.torch.ops.entry_points import public, untraced
from ringlet.torch.optimizer.adasum_optimizer import AdasumMixin
from ringlet.torch.optimizer.lost_memory import (
    mark,
    of_distributed_checkpoint,
    take_mark,
    warn_of_loaded_too_early,
)
from ringlet.torch.optimizer.optimizer_checks import (
    check_is_optimizer,
    refuse_inner_groups,
    refuse_partitioned,
)
from ringlet.torch.optimizer.reducer import Reducer
from ringlet.torch.optimizer.scaler_looks import RefusesScaler, cycle_of, of_scaler
from ringlet.torch.optimizer.step_misuse import NO_COPY
from ringlet.torch.parameters.checkpoint import STATE_KEY, record_in, shards_of
from ringlet.torch.parameters.naming import Named, grouped_names, name_parameters
from ringlet.torch.precision.masters import PRECISION_KEY, Masters, going_on, scale_in
from ringlet.torch.precision.policy_checks import acts, check_policy, check_wire

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

# By the optimizer that was wrapped: what its last wrapper made. Who wraps it again takes over from
# these. An optimizer keeps its masters once it has some: its parameter groups hold them.
_reducers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Reducer]] = (
    weakref.WeakKeyDictionary()
)
_masters: weakref.WeakKeyDictionary[torch.optim.Optimizer, Masters] = weakref.WeakKeyDictionary()


class _Distributed:
    """What DistributedOptimizer adds to the class of the optimizer that it wraps."""

    _ringlet: Reducer
    _ringlet_original: Any
    _ringlet_given: Original
    _ringlet_synchronized: bool
    _ringlet_implied: bool
    _ringlet_cycle: object  # of the GradScaler that has looked last
    _ringlet_skip: bool
    _ringlet_stepping: bool  # whether the wrapped optimizer is at work, and takes its groups
    _ringlet_masters: Masters | None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's; a GradScaler that looks at them waits for the gradients.

        It does so to unscale them, and must see what all ranks agree on. Raises RuntimeError where
        ``precision`` has brought masters or a loss scale, of which a GradScaler knows nothing.
        """
        masters, frame = self._ringlet_masters, sys._getframe(1)
        looks = self._ringlet_due or self._ringlet_implied or masters is not None
        if looks and of_scaler(frame):
            if masters is not None:
                raise RuntimeError(
                    "this optimizer's precision has masters or a loss scale of its own: call "
                    "optimizer.scale(loss).backward() and optimizer.step(), without a GradScaler. "
                    "A GradScaler goes together with precision='amp_bf16', or none"
                )
            cycle = cycle_of(frame)
            if (
                cycle is not None and cycle is not self._ringlet_cycle
            ):  # it has skipped the step that was taken
                self._ringlet_implied = False
            if self._ringlet_due:
                self._ringlet.synchronize(self._ringlet_groups)
                self._ringlet_implied, self._ringlet_cycle = True, cycle
        return self._ringlet_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._ringlet_groups = groups

    # Both are the original's, wherever they are replaced: loading does so, and a scheduler that was
    # made for it, or for a former wrapper, goes on setting what is stepped on.

    @property
    def _ringlet_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._ringlet_original.param_groups
        return groups

    @_ringlet_groups.setter
    def _ringlet_groups(self, groups: list[dict[str, Any]]) -> None:
        self._ringlet_original.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's, by parameter."""
        return self._ringlet_original.state

    @state.setter
    def state(self, state: Any) -> None:
        self._ringlet_original.state = state

    @property
    def _ringlet_due(self) -> bool:
        """Whether gradients of the step at hand are to be waited for, perhaps of other ranks."""
        if self._ringlet_stepping:
            return False
        taken = self._ringlet_implied or self._ringlet_synchronized
        return not taken or self._ringlet.at_hand.in_flight or self._ringlet.at_hand.renewed

    @property
    def _ringlet_half_taken(self) -> bool:
        """Whether compressors have sent something of a step that is not taken yet."""
        return (
            self._ringlet.at_hand.in_flight or self._ringlet_implied or self._ringlet_synchronized
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch hands over what it loaded, and writes to __dict__, where a property hides it.
        state = dict(state)
        for name in ("param_groups", "state"):
            if (loaded := state.pop(name, None)) is not None:
                setattr(self, name, loaded)
        inner: Any = super()
        inner.__setstate__(state)

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:  # Horovod's, and its users', name
        return {p: name for name, p in self._ringlet.parameters.items()}

    @public
    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them before ``step``.

        With masters, their gradients are what ``step`` takes: see ``master_parameters``.
        """
        self._synchronize()
        if self._ringlet_masters is not None:
            self._ringlet_masters.show_gradients()

    def _synchronize(self) -> None:
        masters, again = self._ringlet_masters, self._ringlet_synchronized
        if masters is not None:
            if again and not self._ringlet.at_hand.renewed:
                return  # the loss scale is off already
            if self._ringlet.at_hand.renewed:
                masters.warn_unless_scaled()
            self._ringlet.synchronize(masters.of_model(self._ringlet_groups))
            masters.take_gradients(self._ringlet.gradients)
        elif not self._take_implied():
            self._ringlet.synchronize(self._ringlet_groups)
        self._ringlet_synchronized = True

    @public
    def master_parameters(self) -> list[torch.nn.Parameter]:
        """Return what ``step`` updates: float32 masters where a ``precision`` has brought some.

        After ``synchronize`` their gradients are reduced, and free of a loss scale. Raises
        RuntimeError between ``backward`` and that, when masters have none that could be clipped.
        """
        if self._ringlet_masters is not None and self._ringlet.at_hand.renewed:
            raise RuntimeError(
                "gradients reach the optimizer's parameters in synchronize(): call it after "
                "backward(), before master_parameters()"
            )
        return [p for group in self._ringlet_groups for p in group["params"]]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step without synchronising again, after a ``synchronize`` of one's own."""
        self._ringlet_skip = True
        try:
            yield
        finally:
            self._ringlet_skip = False

    @public
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise, then take the wrapped optimizer's step.

        With a ``closure``, every evaluation of it is followed by a synchronisation, and the loss
        that it returns is reduced like the gradients; so are gradients of a ``backward`` before.
        With a ``precision``, a step in which a gradient overflowed on some rank is skipped on all
        of them. Raises RuntimeError inside ``skip_synchronize`` where ``backward`` has run since
        the last ``synchronize``.
        """
        inner: Any = super()
        if of_distributed_checkpoint(sys._getframe(1)):
            self._refuse_checkpoint_of_masters()
            return self._step_alone()  # of zeros, which is no step of the job's
        # A scheduler that was made for the original asks whether that has stepped.
        self._ringlet_original._opt_called = True
        if closure is not None:
            if self._ringlet_masters is not None:
                raise ValueError("step(closure) does not go together with precision")

            def synchronized() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self._synchronize()
                return self._ringlet.agreed(loss)

            if self._ringlet.at_hand.in_flight or self._ringlet.at_hand.renewed:
                self._synchronize()  # the optimizer may look at gradients that are there already
            try:
                return inner.step(synchronized)
            finally:
                self._ringlet_synchronized = False
        masters = self._ringlet_masters
        if self._ringlet_skip:
            self._ringlet.at_hand.refuse_unsynchronized(masters is not None)
        elif not self._take_implied():
            if self._ringlet_synchronized and self._ringlet_masters is None:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced a second time",
                    stacklevel=outside(),
                )
            self._synchronize()
        self._ringlet_synchronized = False
        if masters is None:
            return self._step_alone()
        masters.see_changes()
        if masters.overflow:
            step_skipped(self._ringlet.step, "overflow")
        result = None if masters.overflow else self._step_alone()
        masters.put_parameters()
        masters.advance(self._ringlet)
        return result

    @untraced
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale of ``precision``: what ``backward`` is called on."""
        return loss if self._ringlet_masters is None else loss * self.loss_scale

    @property
    @untraced
    def loss_scale(self) -> float:
        """The loss scale; 1 without ``precision``."""
        if self._ringlet_masters is not None:
            self._ringlet_masters.asked = True
        return self._scale_now()

    @property
    def skipped_steps(self) -> int:
        """How many steps an overflow has cost."""
        return 0 if self._ringlet_masters is None else self._ringlet_masters.skipped

    # torch wraps `step` for profiling and step hooks; the step inside is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    @public
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients, as the wrapped optimizer does; RuntimeError while they are reduced."""
        self._ringlet.at_hand.refuse_in_flight(
            "zero_grad()",
            "Call it after step(), this optimizer's and not that of what it wraps, or "
            "synchronize() first; after an exception in backward(), abandon_step() gives the step "
            "up on all ranks. If another loss's backward() has reached these parameters, as a "
            "generator's does a discriminator's, call requires_grad_(False) on them meanwhile: "
            "what synchronize() sends stays in residuals",
        )
        self._ringlet_implied = self._ringlet_synchronized = False
        self._ringlet.at_hand.forget_passes()
        inner: Any = super()
        inner.zero_grad(*args, **kwargs)
        if self._ringlet_masters is not None:
            set_to_none = args[0] if args else kwargs.get("set_to_none", True)
            self._ringlet_masters.zero_gradients(set_to_none)

    @public
    def abandon_step(self, why: str = "the script gave the step up") -> None:
        """Give up the step at hand, for example after an exception in ``backward``, or before it.

        On the other ranks ``step`` or ``synchronize`` raises StepAbandoned, telling ``why``. What
        compressors remember stays as it was before the step, or after it, tensor by tensor. Nothing
        is given up where ``step`` or ``synchronize`` has just raised on this rank, because the step
        failed: ``zero_grad`` or a gradient begins the next one. Raises RuntimeError if all ranks
        have reduced the step already; take it then.
        """
        self._ringlet_implied = self._ringlet_synchronized = False
        self._ringlet.at_hand.abandon(why)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and this rank's residuals under one more key.

        Warns between ``backward`` and ``step``, where compressors remember what they have sent of a
        step that is not in the parameters yet.
        """
        if of_distributed_checkpoint(sys._getframe(1)):
            self._refuse_checkpoint_of_masters()
        inner: Any = super()
        state: dict[str, Any] = inner.state_dict()
        kept = self._ringlet.memory.saved(self._ringlet.step)
        if kept is not None:
            state[STATE_KEY] = kept
            if remembered(kept["states"]):
                mark(state, sys._getframe(1))
                if self._ringlet_half_taken and not is_elastic():  # which takes such steps back
                    warnings.warn(
                        "state_dict() between backward() and step(): gradients of this step that "
                        "were sent already are not in the parameters yet, and are lost when it is "
                        "loaded. Save after step()",
                        stacklevel=outside(),
                    )
        if self._ringlet_masters is not None:
            state[PRECISION_KEY] = self._ringlet_masters.state_dict()
        return state

    @public
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and hyper-parameters, and this rank's residuals if they are there.

        Warns where they are another rank's, and starts without any; and of what does not fit,
        because a parameter, or its compressor, is another than when it was saved. Ranks that load
        on their own need ``broadcast_optimizer_state`` afterwards, as with any optimizer. Raises
        RuntimeError between ``backward`` and ``step``.
        """
        self._ringlet.at_hand.refuse_in_flight("load_state_dict")
        kept = record_in(state_dict)  # before anything is loaded
        given = {key: value for key, value in state_dict.items() if key != STATE_KEY}
        before = scale_in(given)
        self._load_inner(given)
        self._ringlet.load(kept)
        self._ringlet.memory.rescale(self._scale_now() / before)

    @public
    def load_sharded(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Load what all ranks of an earlier job saved, of however many.

        Each rank passes all ranks' ``state_dict()``. With as many ranks as before, training goes
        on bit for bit; with another number, averages carry over of what is in units of the
        gradient, such as residuals and momenta; the rest of what compressors remembered does not.
        Raises RuntimeError between ``backward`` and ``step``.
        """
        self._ringlet.at_hand.refuse_in_flight("load_sharded")
        own, shards = shards_of(state_dicts, current().rank)
        before = scale_in(own)
        self._load_inner(own)
        self._ringlet.load_shards(shards)
        self._ringlet.memory.rescale(self._scale_now() / before)

    @public
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up before gradients are reduced."""
        self._ringlet.set_passes(passes)

    @public
    def set_compression(self, compression: Spec | Routes) -> None:
        """Compress differently from the next step on; all ranks call it alike.

        Residuals carry over to compressors with error feedback. Where only options change, all that
        is in units of the gradient carries over. Whatever else the old compressors remembered is
        forgotten, and rank 0 warns of it. Raises RuntimeError between ``backward`` and ``step``.
        """
        self._ringlet.set_compression(compression)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._ringlet.memory.norm()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NO_COPY)

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        inner: Any = super()
        masters, before = state_dict.pop(PRECISION_KEY, None), self._scale_now()
        if self._ringlet_masters is not None and masters is not None:
            self._ringlet_masters.check(masters)  # before anything is loaded
        inner.load_state_dict(state_dict)
        if self._ringlet_masters is not None and masters is not None:
            self._ringlet_masters.load_state_dict(masters)
            self._ringlet.memory.rescale(self._scale_now() / before)
        take_mark(self._ringlet_groups)

    def _refuse_checkpoint_of_masters(self) -> None:
        """Raise RuntimeError for torch.distributed.checkpoint, which knows no names of masters."""
        if self._ringlet_masters is not None and self._ringlet_masters.pairs:
            raise RuntimeError(
                "torch.distributed.checkpoint finds an optimizer's state by its model's parameters,"
                " and this precision has brought float32 masters in their place: save and load "
                "optimizer.state_dict() by itself, on every rank"
            )

    def _step_alone(self) -> Any:
        """Take the wrapped optimizer's step."""
        inner: Any = super()
        self._ringlet_stepping = True
        try:
            return inner.step()
        finally:
            self._ringlet_stepping = False

    def _scale_now(self) -> float:
        return 1.0 if self._ringlet_masters is None else self._ringlet_masters.scale.scale

    def _take_implied(self) -> bool:
        """Return whether looking at ``param_groups`` has synchronised this step already."""
        implied, self._ringlet_implied = self._ringlet_implied, False
        return implied and not self._ringlet.at_hand.in_flight


@public
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Opt,
    named_parameters: Named | None = None,
    compression: Spec | Routes | Any = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    precision: str | Policy | None = None,
) -> Opt:
    """Return ``optimizer`` with gradients reduced over all ranks before every step. Collective.

    The result is an instance of a subclass of the optimizer's class that shares its parameter
    groups and state; use it instead of the original. Wrapping the original again, for example when
    parameters were added or unfrozen, replaces it and keeps residuals.

    - ``named_parameters``: ``model.named_parameters()``; not needed where ``optimizer`` was made of
      these.
    - ``compression``: a spec such as ``"topk(ratio=0.01) | ef"``, a Compressor, or a mapping from
      name patterns to specs, first match first: ``{"*.bias": "none", "*": "int8 | ef"}``.
    - ``backward_passes_per_step``: passes whose gradients are summed before they are reduced.
    - ``op``: Average, Sum, or Adasum, which combines the steps of the ranks' optimizers instead,
      and takes one of "none", "fp16" and "bf16" for all parameters.
    - ``gradient_predivide_factor``: divide by this before the sum and by size / this after it.
    - ``groups``: parameters that travel together, as lists of them, or how many groups to make;
      by default tensors are fused as they fit. (``num_groups`` is its deprecated form.)
    - ``sparse_as_dense``: reduce sparse gradients as dense ones even where they are large.
    - ``process_set``: the ranks that take part; on others gradients stay as they are.
    - ``precision``: a policy such as ``"bf16"`` or ``"fp16"`` that ``apply_precision`` gave the
      model: float32 masters, a loss scale (see ``scale``), in what sums accumulate, and its wire if
      ``compression`` is None.

    Raises Mismatch, the same on every rank, when ranks hold different parameters, arguments (but
    ``backward_passes_per_step``, which each rank counts for itself) or classes of optimizers;
    ValueError for names that do not fit the parameters; SpecError for a bad ``compression``.
    """
    options = Options.among(locals())
    _check_optimizer(optimizer)
    policy, masters_before = options.policy, _masters.get(optimizer)
    _agree_on_arguments(type(optimizer), options)
    held = optimizer.param_groups
    if masters_before is not None:
        if masters_before.pairs and not acts(policy):
            raise ValueError(
                "this optimizer steps on the float32 masters that a precision has brought: wrap it "
                "again with precision=, or make a new optimizer"
            )
        held = masters_before.of_model(held)
    named = name_parameters(held, named_parameters)
    check_policy(policy, named, options.op)
    if policy.masters:
        refuse_inner_groups(
            optimizer,
            f"it would not see the float32 masters of policy {policy.name!r}; keep parameters in "
            "float32 with precision='amp_bf16', or use another optimizer",
        )
    if options.op is ReduceOp.ADASUM:
        refuse_partitioned(optimizer, "op=Adasum combines whole steps; use op=Average")
    check_wire(policy, options.router.compressors)
    if (before := last_made(optimizer)) is not None:
        before._ringlet_given.take_back(before)
    given = Original(optimizer, spared=("step",))  # which a scheduler has wrapped on the instance
    if options.op is ReduceOp.ADASUM:
        distributed: Any = wrapped(optimizer, AdasumMixin)
        distributed.__dict__.update(AdasumMixin.prepared(named, options))
    else:
        made = _reduction_of(optimizer, named, options, masters_before)
        distributed = wrapped(optimizer, _Distributed)
        distributed.__dict__.update(made)
        for shared in ("param_groups", "state"):
            distributed.__dict__.pop(shared, None)
        distributed._ringlet_synchronized = distributed._ringlet_implied = False
        distributed._ringlet_skip = distributed._ringlet_stepping = False
        distributed._ringlet_cycle = None
    # A scheduler made for the original has wrapped its step on the instance; ours must be found.
    distributed.__dict__.pop("step", None)
    distributed._ringlet_original, distributed._ringlet_given = optimizer, given
    note_made(optimizer, distributed)
    result: Opt = distributed
    return result


def _check_optimizer(optimizer: object) -> None:
    """Raise ValueError or TypeError unless ``optimizer`` can be wrapped."""
    refuse_wrapped(optimizer, (_Distributed, AdasumMixin))
    if isinstance(optimizer, RefusesScaler):
        raise ValueError(
            f"{type(optimizer).__name__} communicates by itself: use it without "
            "DistributedOptimizer"
        )
    check_is_optimizer(optimizer)


def _reduction_of(
    optimizer: torch.optim.Optimizer,
    named: dict[str, torch.nn.Parameter],
    options: Options,
    masters_before: Masters | None,
) -> dict[str, Any]:
    """Make what reduces the gradients of ``named``, and masters if there are to be some.

    Returns the attributes that keep them. The parameter groups of ``optimizer`` hold masters then.
    """
    policy = options.policy
    scale, _ = going_on(policy, masters_before)
    unscaling = Unscaling(scale.scale) if scale.watches else None
    groups = grouped_names(named, options.grouping)
    before, title = _reducer_of(optimizer), type(optimizer).__name__
    if take_mark(optimizer.param_groups):
        warn_of_loaded_too_early()
    reducer = Reducer(named, options, groups, unscaling, before, title)
    _reducers[optimizer] = weakref.ref(reducer)
    masters = None
    if acts(policy):
        masters = Masters(optimizer, named, policy, unscaling, masters_before)
        _masters[optimizer] = masters
        masters.deliver_to(reducer)
    return {"_ringlet": reducer, "_ringlet_masters": masters}


def _reducer_of(optimizer: torch.optim.Optimizer) -> Reducer | None:
    """Return what has reduced the gradients of ``optimizer`` so far, if it still does."""
    found = _reducers.get(optimizer)
    return None if found is None else found()


def _agree_on_arguments(base: type, options: Options) -> None:
    """Raise Mismatch, on every rank, unless all wrap optimizers of one class in the same way.

    Arguments that requests tell, such as ``compression``, are compared where these are declared.
    """
    told = {
        "the class of the optimizer that is wrapped": base.__name__,
        "precision": options.described_precision,
        "op=Adasum": options.op is ReduceOp.ADASUM,
        "sparse_as_dense": bool(options.sparse_as_dense),
    }
    remedy = "wrap optimizers of one class, with the same arguments, on all ranks"
    agree_on_settings("DistributedOptimizer", told, options.process_set, remedy)
