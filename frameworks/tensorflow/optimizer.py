"""DistributedOptimizer: for Keras's optimizers, and for those of ``tf.compat.v1``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.keras import tf_keras
from ringlet.keras.optimizer import distributed
from ringlet.precision import Policy
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_reducer import GradientReducer, LocalReducer
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import of_attributes, unique
from ringlet.shared.variable_names import identity, name_of
from ringlet.shared.wrapping import last_made, note_made, refuse_wrapped, wrapped
from ringlet.tensorflow.ops.bridge import as_written, in_graph
from ringlet.tensorflow.ops.gradient_node import BROADCAST_VARIABLES, reduced
from ringlet.tensorflow.ops.tensors import divided
from ringlet.tensorflow.ops.topology_ops import size_of

_V1: Any = tf.compat.v1.train.Optimizer
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # what was wrapped of its kind


class _Distributed:
    """What DistributedOptimizer adds to the class of a ``tf.compat.v1`` optimizer."""

    _ringlet: GradientReducer
    _ringlet_accumulator: Accumulator
    _ringlet_groups: Any
    _ringlet_ends: Any
    _ringlet_trained: Sequence[Any]
    _ringlet_local: set[int]
    _ringlet_local_reducer: tuple[LocalReducer, Accumulator]
    _ringlet_scale_local: bool

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of ``variable`` as it is on this rank."""
        self._ringlet_local.add(identity(variable))

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the gradients of the wrapped optimizer, reduced over all ranks."""
        inner: Any = super()
        pairs = inner.compute_gradients(*args, **kwargs)
        every = self._ringlet_trained = [variable for _, variable in pairs]
        shared = [i for i, v in enumerate(every) if identity(v) not in self._ringlet_local]
        variables = [every[i] for i in shared]
        names = unique([name_of(v, i) for i, v in enumerate(variables)])
        given = [pairs[i][0] for i in shared]
        chosen = self._ringlet.cohorts(variables, self._ringlet_groups)
        self._ringlet_ends, done = reduced(
            self._ringlet, variables, names, given, chosen, self._ringlet_accumulator
        )
        results = self._ringlet_kept(pairs, shared)
        for i, gradient in zip(shared, done, strict=True):
            results[i] = gradient
        return list(zip(results, every, strict=True))

    def _ringlet_kept(self, pairs: Sequence[tuple[Any, Any]], shared: Sequence[int]) -> list[Any]:
        """Scale the gradients of local variables, and add up those of several passes."""
        results = [gradient for gradient, _ in pairs]
        local = [i for i in range(len(results)) if i not in shared]
        if local and self._ringlet_scale_local:
            size = size_of(self._ringlet.settings.process_set)
            for i in local:
                results[i] = None if results[i] is None else divided(results[i], size)
        reducer, sums = self._ringlet_local_reducer
        if local and sums.passes > 1:
            variables = [pairs[i][1] for i in local]
            names = unique([name_of(v, i) for i, v in enumerate(variables)])
            given = [results[i] for i in local]
            _, added = reduced(reducer, variables, names, given, [""] * len(local), sums)
            for i, gradient in zip(local, added, strict=True):
                results[i] = gradient
        return results

    @as_written
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply what ``compute_gradients`` returned; between steps, only count them."""
        inner: Any = super()
        pairs, ends = list(grads_and_vars), self._ringlet_ends
        if self._ringlet_accumulator.passes == 1 or ends is None:
            return inner.apply_gradients(pairs, global_step, name)

        def count() -> Any:
            return None if global_step is None else global_step.assign_add(1)

        if not in_graph():
            return inner.apply_gradients(pairs, global_step, name) if ends else count()

        def apply() -> Any:
            with tf.control_dependencies([inner.apply_gradients(pairs, global_step, name)]):
                return tf.constant(True)

        def skip() -> Any:
            counted = count()
            with tf.control_dependencies([] if counted is None else [counted]):
                return tf.constant(False)

        return tf.group(tf.cond(ends, apply, skip))


@public
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec | Routes | Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    precision: str | Policy | None = None,
) -> Any:
    """Return an optimizer whose gradients are reduced over all ranks before they are applied.

    ``optimizer`` is one of Keras 3 or tf_keras, for which see
    ``ringlet.keras.DistributedOptimizer``, or one of ``tf.compat.v1.train``, in a graph or eager:
    its ``compute_gradients`` reduces, all gradients in one node. Arguments mean the same for all,
    but that those of ``tf.compat.v1`` have no loss scale, which the ``precision`` "fp16" needs.
    Raises ValueError for that, and for an optimizer that is wrapped already; TypeError for anything
    else.
    """
    options = Options.among(locals())
    if isinstance(optimizer, keras.optimizers.Optimizer) or tf_keras.is_optimizer(optimizer):
        return distributed(optimizer, name, options)
    refuse_wrapped(optimizer, _Distributed)
    if not isinstance(optimizer, _V1):
        raise TypeError(
            "optimizer is a keras.optimizers.Optimizer or a tf.compat.v1.train.Optimizer, not "
            f"{type(optimizer).__name__}"
        )
    options.check_sums()
    current()
    if options.policy.scale.watches:
        raise ValueError(
            f"policy {options.policy.name!r} has a loss scale, and optimizers of tf.compat.v1 "
            "cannot have one; take 'bf16', or a Keras optimizer"
        )
    title = name or optimizer.get_name()
    told = {"the class of the optimizer": type(optimizer).__name__, **of_attributes(optimizer)}
    made = wrapped(optimizer, _Distributed)
    told |= options.passes
    reducer = GradientReducer(
        "DistributedOptimizer", options.settings(), title, told=told, cure=BROADCAST_VARIABLES
    )
    added, local = reducer.accumulators = options.accumulator(), options.accumulator()
    if (before := last_made(optimizer)) is not None:
        reducer.inherit(before._ringlet)
    made.__dict__.update(
        _ringlet=reducer,
        _ringlet_accumulator=added,
        _ringlet_groups=options.grouping,
        _ringlet_ends=None,
        _ringlet_trained=(),
        _ringlet_local=set() if before is None else set(before._ringlet_local),
        _ringlet_local_reducer=(LocalReducer("local variables", options.settings()), local),
        _ringlet_scale_local=options.scale_local_gradients,
        _optimizer=optimizer,  # where Horovod's users look for what they wrapped
    )
    note_made(optimizer, made)
    _made.add(made)
    return made


def forget_passes(variables: Iterable[Any]) -> None:
    """Let optimizers of ``tf.compat.v1`` that train some of ``variables`` count passes anew."""
    for optimizer in _training(variables):
        optimizer._ringlet_accumulator.reset()


def reducers_of_v1(variables: Iterable[Any]) -> list[GradientReducer]:
    """Return what reduces gradients for those optimizers."""
    return [optimizer._ringlet for optimizer in _training(variables)]


def _training(variables: Iterable[Any]) -> list[Any]:
    own = set(map(id, variables))
    return [made for made in list(_made) if not own.isdisjoint(map(id, made._ringlet_trained))]
