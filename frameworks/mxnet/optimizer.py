"""DistributedOptimizer for MXNet's modules, and DistributedTrainer for Gluon."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.mxnet.nd_views import refuse_devices, view
from ringlet.ring.callers import outside
from ringlet.shared.drift import RATE
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import CommonValue, Slot
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import of_attributes, unique
from ringlet.shared.variable_names import numbered_groups, warn_of_unmatched

_KIND = "DistributedOptimizer"
_BROADCAST = "call hvd.broadcast_parameters on all ranks before training"
_BATCH = (
    "pass step() the same batch size on all ranks: leave the last batch away, or fill it up, where "
    "one rank's is smaller"
)
# Of an optimizer's numbers: what is compared in other ways, and what counts its steps.
_SPARED = frozenset({"lr", "rescale_grad", "num_update", "begin_num_update"})
# What a DistributedOptimizer has of its own; all else that is set on it is the wrapped optimizer's.
_OWN = frozenset({"_optimizer", "_settings", "_told", "_reducers", "_warns"})


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that averages gradients over all ranks before it updates weights.

    Each index is a gradient of its own, as in Horovod; compressors keep what they remember by it.
    Where MXNet tells the optimizer names of weights, as a Module does, ``compression`` may be a
    mapping of patterns of these to specs. Attributes are those of the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        compression: Spec | Routes | Any = None,
    ) -> None:
        self._optimizer = optimizer
        self._settings = Options.among(locals()).settings()
        self._told = _told(optimizer)
        self._reducers: dict[tuple[Slot, ...], GradientReducer] = {}
        self._warns = True  # of patterns that match no weight, once all weights have come

    def __setattr__(self, name: str, value: Any) -> None:
        # MXNet sets names of weights and the scale of gradients, by which the wrapped one updates.
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Return what the wrapped optimizer keeps for a weight."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Return what the wrapped optimizer keeps for a weight of 16 bits."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce ``grad`` in place, and update ``weight``; lists of them, too."""
        self._reduce(index, weight, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduce ``grad`` in place, and update a ``weight`` of 16 bits."""
        self._reduce(index, weight, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        """Set the wrapped optimizer's rate."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """Set the wrapped optimizer's factors of rates."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """Set the wrapped optimizer's factors of decay."""
        self._optimizer.set_wd_mult(args_wd_mult)

    def _reduce(self, index: Any, weight: Any, grad: Any) -> None:
        listed = isinstance(index, tuple | list)
        each = index, weight, grad
        indices, weights, grads = map(list, each) if listed else ([one] for one in each)
        names = [str(self._optimizer.idx2name.get(i, i)) for i in indices]
        arrays = [
            view(each, f"the gradient of {n!r}") for n, each in zip(names, grads, strict=True)
        ]
        slots = _slots(names, arrays)
        reducer = self._reducers.get(slots)
        if reducer is None:
            reducer = self._reducers[slots] = GradientReducer(
                _KIND, self._settings, warns=False, told=self._told, cure=_BROADCAST
            )
        elif self._warns:  # a gradient comes again: all have come once
            self._warns = False
            asked = self._settings.process_set
            if asked.included() and asked.rank() == 0:
                known = [slot.name for listed in self._reducers for slot in listed]
                warn_of_unmatched(self._settings.router, known)

        def shown() -> list[tuple[str, Any]]:
            values = [(name, view(w)) for name, w in zip(names, weights, strict=True)]
            return [*values, (RATE, np.array(self._optimizer.learning_rate))]

        reducer.reduce(slots, arrays, outputs=arrays, shown=shown)


class DistributedTrainer(mx.gluon.Trainer):
    """A Gluon trainer that averages gradients over all ranks, all of a step in one exchange.

    ``compression`` is a spec, or a mapping of patterns of parameters' names to specs; ``prefix``
    goes before the names. ``num_groups`` parts them into so many groups that travel together.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Spec | Routes | Any = None,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer reduces gradients by itself, and takes the optimizer inside "
                "the DistributedOptimizer alone: pass it that one, and its own compression=",
                stacklevel=outside(),
            )
            optimizer = optimizer._optimizer
        settings = Options.among(locals()).settings()
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        self._prefix, self._groups = prefix or "", num_groups
        told = _told(self._optimizer)
        self._reducer = GradientReducer("DistributedTrainer", settings, told=told, cure=_BROADCAST)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._reducer.memory.norm()

    def _allreduce_grads(self) -> None:
        used = [param for param in self._params if param.grad_req != "null"]
        names = unique([f"{self._prefix}{param.name}" for param in used])
        for name, param in zip(names, used, strict=True):
            refuse_devices(param, f"parameter {name!r}")
        arrays = [
            view(param.list_grad()[0], f"the gradient of {name!r}")
            for name, param in zip(names, used, strict=True)
        ]

        def shown() -> list[tuple[str, Any]]:
            values = [(n, view(p.list_data()[0])) for n, p in zip(names, used, strict=True)]
            return [*values, (RATE, np.array(self.learning_rate))]

        if arrays:
            slots = _slots(names, arrays, self._groups)
            scale = CommonValue("rescale_grad", str(self._optimizer.rescale_grad), _BATCH)
            self._reducer.reduce(slots, arrays, outputs=arrays, shown=shown, common=scale)


def _told(optimizer: Any) -> dict[str, object]:
    """Return what ranks must have in common: the class of an optimizer, and its numbers."""
    plain = of_attributes(optimizer, _SPARED)
    return {"the class of the optimizer": type(optimizer).__name__, **plain}


def _slots(names: Sequence[str], arrays: Sequence[Any], groups: int = 0) -> tuple[Slot, ...]:
    cohorts = numbered_groups(len(names), groups) if groups else [""] * len(names)
    return tuple(
        Slot(name, np.dtype(array.dtype).name, tuple(array.shape), False, cohort)
        for name, array, cohort in zip(names, arrays, cohorts, strict=True)
    )
