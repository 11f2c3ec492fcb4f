"""DistributedOptimizer(op=Adasum): every rank steps on its own, and the steps are combined.

Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021. Steps that agree
are averaged, steps that are orthogonal add up, so that the learning rate need not grow with ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from ringlet.compressors import BF16, FP16, NoCompression
from ringlet.fusion import Engine
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.gradients.accumulation import check_passes
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import agree
from ringlet.shared.requests import check_predivide
from ringlet.torch.ops.entry_points import untraced
from ringlet.torch.ops.handles import TorchHandle
from ringlet.torch.ops.reductions import grouped_allreduce_async_
from ringlet.torch.optimizer.double_reduction import refuse_ddp
from ringlet.torch.optimizer.drift_check import DriftCheck
from ringlet.torch.optimizer.lost_memory import of_distributed_checkpoint
from ringlet.torch.optimizer.optimizer_checks import warn_of_no_gradients
from ringlet.torch.optimizer.scaler_looks import RefusesScaler
from ringlet.torch.optimizer.step_misuse import NO_COPY, REPEAT
from ringlet.torch.parameters.frozen import refuse_strays


class _Step(NamedTuple):
    """A step that is being combined: where it began, with what, and what the optimizer returned."""

    start: dict[str, torch.Tensor]
    handle: TorchHandle
    result: Any


class AdasumMixin(RefusesScaler):
    """What the optimizer's class gains."""

    _ringlet_named: dict[str, torch.nn.Parameter]
    _ringlet_known: frozenset[torch.nn.Parameter]
    _ringlet_compression: Any
    _ringlet_process_set: ProcessSet
    _ringlet_label: str  # among optimizers of its process set
    _ringlet_engine: Engine | None  # on which the label was made, anew in each epoch of a job
    _ringlet_drift: DriftCheck  # of that epoch
    _ringlet_agreed: bool  # whether ranks name the same parameters in it
    _ringlet_alone: bool  # whether it is known that nobody else reduces
    _ringlet_awaits: bool  # a first gradient
    _ringlet_under_way: _Step | None
    _ringlet_original: Any

    @staticmethod
    def prepared(named: dict[str, torch.nn.Parameter], options: Options) -> dict[str, Any]:
        """Return the attributes of an instance; ValueError for arguments that Adasum cannot use."""
        check_passes(options.backward_passes_per_step)
        check_predivide(options.gradient_predivide_factor, options.op)
        router, compressor = options.router, options.router("")
        if router.by_name or not isinstance(compressor, NoCompression | FP16 | BF16):
            raise ValueError(
                "op=Adasum combines whole steps, and takes one compression for all: 'none', "
                f"'fp16' or 'bf16', not {str(router)!r}; other compressors go with op=Average"
            )
        return {
            "_ringlet_named": dict(sorted(named.items())),  # ranks may list them in any order
            "_ringlet_known": frozenset(named.values()),
            "_ringlet_compression": compressor,
            "_ringlet_process_set": options.process_set,
            "_ringlet_label": "",
            "_ringlet_engine": None,
            "_ringlet_agreed": False,
            "_ringlet_alone": False,
            "_ringlet_awaits": True,
            "_ringlet_under_way": None,
        }

    @property
    def _scaler_meets(self) -> str:
        return "op=Adasum"

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:  # Horovod's, and its users', name
        return {p: name for name, p in self._ringlet_named.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what the optimizer saved; a scheduler of the original goes on with its groups."""
        inner: Any = super()
        inner.load_state_dict(state_dict)
        self._ringlet_original.param_groups = self.param_groups
        self._ringlet_original.state = self.__dict__["state"]

    def synchronize(self) -> None:
        """Do nothing: gradients are each rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do nothing: there is no synchronisation to skip."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accept how many passes add up; with Adasum ranks meet in ``step`` only."""
        check_passes(passes)

    @untraced
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; RuntimeError after a step that was interrupted.

        Takes what the wrapped optimizer's does, which need not be ``set_to_none``.
        """
        if self._ringlet_under_way is not None:
            raise RuntimeError(f"zero_grad() while ranks' steps are being combined. {REPEAT}")
        inner: Any = super()
        inner.zero_grad(*args, **kwargs)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take this rank's step, then replace it by what Adasum makes of all ranks' steps.

        Where that fails, parameters are as before; the wrapped optimizer's state is not. After a
        step that was interrupted while ranks' steps were combined, such as by a KeyboardInterrupt,
        take that one alone.

        The step of zeros by which torch's distributed checkpoint, on any rank, has an optimizer
        make its state is this rank's own.
        """
        inner: Any = super()
        if of_distributed_checkpoint(sys._getframe(1)):
            return inner.step(closure)
        self._ringlet_original._opt_called = True
        if self._ringlet_under_way is not None:
            return self._take_combined(self._ringlet_under_way)
        start = {name: p.detach().clone() for name, p in self._ringlet_named.items()}
        taking_part = self._ringlet_process_set.included()
        if taking_part:
            self._refuse_ddp()
        if taking_part and closure is None:
            self._refuse_strays()
        try:
            result = inner.step(closure)
            if not taking_part:
                return result
            if closure is not None:
                self._refuse_strays()
            self._warn_without_gradients()
            self._agree()
            if not start:
                return result
            self._ringlet_under_way = _Step(start, self._combine(start), result)
        except BaseException:
            self._put_back(start)
            raise
        return self._take_combined(self._ringlet_under_way)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(NO_COPY)

    def _combine(self, start: Mapping[str, torch.Tensor]) -> TorchHandle:
        """Begin to combine all ranks' steps away from ``start``."""
        with torch.no_grad():
            return grouped_allreduce_async_(
                [p.detach() - start[name] for name, p in self._ringlet_named.items()],
                name=self._label(),
                op=ReduceOp.ADASUM,
                process_set=self._ringlet_process_set,
                compression=self._ringlet_compression,
            )

    def _take_combined(self, step: _Step) -> Any:
        """Wait for what Adasum makes of all ranks' steps, and step there."""
        try:
            combined = step.handle.wait()
            with torch.no_grad():
                for (name, p), delta in zip(self._ringlet_named.items(), combined, strict=True):
                    p.copy_(step.start[name] + delta)
        except BaseException as error:  # parameters are each rank's own until steps are combined
            self._put_back(step.start)
            # What is interrupted can be waited for again, and must be: others take this step.
            if isinstance(error, Exception):
                self._ringlet_under_way = None
            raise
        self._ringlet_under_way = None
        if self._ringlet_process_set.size() > 1:
            self._ringlet_drift.look(self._shown_groups(), dict)
        return step.result

    def _put_back(self, start: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self._ringlet_named.items():
                p.copy_(start[name])

    def _label(self) -> str:
        """Return the name of what is combined, the same on all ranks of the process set.

        They make optimizers for other sets, and newcomers theirs in another epoch: what all count
        alike is which optimizer of the set has its first step when.
        """
        runtime = current()
        if self._ringlet_engine is not runtime.engine:
            number = self._ringlet_process_set.number()
            self._ringlet_label = runtime.unnamed("AdasumOptimizer", number)
            self._ringlet_engine, self._ringlet_agreed = runtime.engine, False
            named, ranks = self._ringlet_named, self._ringlet_process_set
            self._ringlet_drift = DriftCheck(named, self._ringlet_label, ranks)
        return self._ringlet_label

    def _agree(self) -> None:
        """In an epoch's first step: raise Mismatch, on all ranks, unless all name parameters alike.

        Steps are combined by their place, in the order of the names.
        """
        label = self._label()
        if self._ringlet_agreed or self._ringlet_process_set.size() == 1:
            return
        items = [(name, str([*p.shape])) for name, p in self._ringlet_named.items()]
        agree("DistributedOptimizer", f"{label}.names", items, self._ringlet_process_set)
        self._ringlet_agreed = True

    def _refuse_ddp(self) -> None:
        """In the first step: raise RuntimeError where DistributedDataParallel reduces too."""
        if not self._ringlet_alone and self._ringlet_process_set.size() > 1:
            refuse_ddp(self._ringlet_known)
        self._ringlet_alone = True

    def _warn_without_gradients(self) -> None:
        """In the first step: warn if no parameter has a gradient. The model may have others."""
        awaits, self._ringlet_awaits = self._ringlet_awaits, False
        if not awaits or not self._ringlet_known or self._ringlet_process_set.size() == 1:
            return
        if all(p.grad is None for p in self._ringlet_known):
            warn_of_no_gradients(len(self._ringlet_known))

    def _refuse_strays(self) -> None:
        cure = "wrap the original optimizer again, on all ranks"
        groups = self.param_groups
        refuse_strays(groups, self._ringlet_known, "DistributedOptimizer", cure)

    step.hooked = True  # type: ignore[attr-defined]
